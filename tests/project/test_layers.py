"""Check in fresh interpreters what may be imported where; import-linter checks the static imports."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import RunScript

ROOT = Path(__file__).parents[2]
MOST_MODULES = 15
NOTEBOOK = ("IPython", "anywidget", "ipykernel", "ipywidgets", "jupyter_server", "sparkmonitor", "traitlets")

IMPORTED = """
    import importlib, sys
    for module in {modules!r}:
        importlib.import_module(module)
    print(*sorted({{name.partition(".")[0] for name in sys.modules}} & set({watched!r})))
"""


def modules_of(package: str) -> list[str]:
    files = ROOT.joinpath(*package.split(".")).rglob("*.py")
    named = (".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files if file.stem != "__main__")
    return [name.removesuffix(".__init__") for name in named]


def imported(run_script: RunScript, modules: list[str], watched: tuple[str, ...]) -> str:
    return str(run_script(IMPORTED.format(modules=modules, watched=watched)).stdout.strip())


def test_importing_tfos_nb_loads_neither_spark_nor_tensorflow(run_script: RunScript) -> None:
    assert imported(run_script, ["tfos_nb"], ("pyspark", "tensorflow", "keras", "IPython")) == ""


@pytest.mark.parametrize("package", ["tfos_nb", "tfos_nb.runtime"])
def test_importing_a_module_does_not_load_tensorflow(run_script: RunScript, package: str) -> None:
    assert imported(run_script, modules_of(package), ("tensorflow", "keras")) == ""


def test_modules_of_executors_load_no_notebook_library(run_script: RunScript) -> None:
    assert imported(run_script, modules_of("tfos_nb.runtime"), NOTEBOOK) == ""


def test_a_supervisor_starts_without_large_libraries(run_script: RunScript) -> None:
    large = ("numpy", "pandas", "pyarrow", "grpc", "pyspark", "tensorflow")
    assert imported(run_script, ["tfos_nb.runtime.node.supervisor"], large) == ""


def test_imports_follow_the_layers() -> None:
    linter = Path(sys.executable).parent / "lint-imports"
    if not linter.exists():
        pytest.skip("import-linter is not installed here; make check runs it")
    ended = subprocess.run([str(linter), "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout


PACKAGES = sorted(file.parent for file in (ROOT / "tfos_nb").rglob("__init__.py"))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: str(package.relative_to(ROOT)))
def test_a_package_has_few_modules_and_a_docstring(package: Path) -> None:
    modules = [file for file in package.glob("*.py") if file.name != "__init__.py"]
    assert len(modules) <= MOST_MODULES
    assert ast.get_docstring(ast.parse((package / "__init__.py").read_text()))


IMPORTERS = re.compile(r"((?:``\w[\w.]*``(?:, | and )?)+) imports? this package\.")


@functools.cache
def importers() -> dict[str, set[str]]:
    """Return the packages, and the modules at the top of ``tfos_nb``, that import each package from outside of it."""
    graph = pytest.importorskip("grimp").build_graph("tfos_nb", exclude_type_checking_imports=True)
    packages = {".".join(package.relative_to(ROOT).parts) for package in PACKAGES}

    def package_of(module: str) -> str:
        return module if module in packages else module.rpartition(".")[0]

    found: dict[str, set[str]] = {package: set() for package in packages}
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            one, other = package_of(module), package_of(imported)
            if not covers(other, one):
                found[other].add(module if one == "tfos_nb" else one)
    return found


def covers(package: str, module: str) -> bool:
    """Return whether a module is the package or in it; ``tfos_nb`` stands for its own module only."""
    return module == package or (package != "tfos_nb" and module.startswith(f"{package}."))


@pytest.mark.parametrize("package", [".".join(package.relative_to(ROOT).parts) for package in PACKAGES[1:]])
def test_a_package_says_who_imports_it(package: str) -> None:
    file = ROOT.joinpath(*package.split("."), "__init__.py")
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    said = IMPORTERS.search(" ".join(docstring.split()))
    named = re.findall(r"``([\w.]+)``", said[1]) if said else []
    named = [name if name == "tfos_nb" else f"tfos_nb.{name}" for name in named]
    unnamed = {one for one in importers()[package] if not any(covers(name, one) for name in named)}
    idle = {name for name in named if not any(covers(name, one) for one in importers()[package])}
    assert (unnamed, idle) == (set(), set())


def test_each_package_has_a_folder_of_tests() -> None:
    folders = [package.relative_to(ROOT / "tfos_nb") for package in PACKAGES]
    assert [str(folder) for folder in folders if not list((ROOT / "tests" / folder).glob("**/test_*.py"))] == []


@pytest.mark.parametrize("name", ["helpers", "utils", "common", "misc"])
def test_no_module_has_a_catch_all_name(name: str) -> None:
    assert not [file for folder in ("tfos_nb", "tests", "benchmarks") for file in (ROOT / folder).rglob(f"{name}.py")]
