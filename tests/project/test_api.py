"""The public names of the package, which are imported when they are first used."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest

import tfos_nb
from tests.conftest import RunScript

# Without the modules that `python -m` runs: importing them is not part of the API.
MODULES = sorted(
    name for _, name, _ in pkgutil.walk_packages(tfos_nb.__path__, "tfos_nb.") if not name.endswith("__main__")
)


def test_dir_lists_the_names_of_all() -> None:
    assert dir(tfos_nb) == sorted(tfos_nb.__all__)
    assert [name for name in tfos_nb.__all__ if not hasattr(tfos_nb, name)] == []


@pytest.mark.parametrize("name", sorted(set(tfos_nb.__all__) - {"__version__"}))
def test_every_public_name_has_a_docstring(name: str) -> None:
    assert inspect.getdoc(getattr(tfos_nb, name))


def test_a_missing_name_raises_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'tfos_nb' has no attribute 'lunch'"):
        tfos_nb.lunch  # noqa: B018


def test_star_import_gives_the_names_of_all() -> None:
    namespace: dict[str, object] = {}
    exec("from tfos_nb import *", namespace)
    assert set(tfos_nb.__all__) <= set(namespace)


@pytest.mark.parametrize(
    ("use", "loaded"),
    [
        ("tfos_nb.__version__", []),
        ("tfos_nb.errors.PlanError", ["tfos_nb.errors"]),
        (
            "tfos_nb.ClusterPlan",
            [
                "tfos_nb.errors",
                "tfos_nb.rich",
                "tfos_nb.runtime",
                "tfos_nb.runtime.control",
                "tfos_nb.runtime.control.plan",
            ],
        ),
    ],
)
def test_a_name_imports_only_the_modules_it_needs(run_script: RunScript, use: str, loaded: list[str]) -> None:
    ended = run_script(f"""
        import sys, tfos_nb
        {use}
        print(*sorted(name for name in sys.modules if name.startswith("tfos_nb.")))
        print(*sorted({{"pyspark", "tensorflow", "grpc", "pyarrow", "numpy", "IPython"}} & set(sys.modules)))
    """)
    assert ended.stdout.splitlines() == [
        " ".join([*loaded, "tfos_nb.version"]),
        "",
    ]  # the last one is also last by name


@pytest.mark.parametrize("name", MODULES)
def test_the_names_in_all_exist_and_are_sorted(name: str) -> None:
    module = importlib.import_module(name)
    offered = getattr(module, "__all__", [])
    assert [each for each in offered if not hasattr(module, each)] == []
    assert list(offered) == sorted(offered, key=lambda each: (not each.isupper(), each[:1].islower(), each))
