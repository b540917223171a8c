"""The contents of the wheel and of the sdist."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import tfos_nb

ROOT = Path(__file__).parents[2]
PARTS = (
    *(".ci", "benchmarks", "docs", "jupyter-config", "notebooks", "tests", "tfos_nb"),
    *("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md", "constraints.txt"),
    *("pyproject.toml", "setup.py"),
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist of a copy of this checkout, and the wheel from it; return their folder."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, source / part)
    command = [sys.executable, "-m", "build", "--outdir", str(out), str(source)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return out


def only(folder: Path, pattern: str) -> Path:
    (file,) = folder.glob(pattern)
    return file


def test_the_wheel_has_the_package_and_the_configuration_of_jupyter(built: Path) -> None:
    with zipfile.ZipFile(only(built, "*.whl")) as wheel:
        names = wheel.namelist()
        config = next(name for name in names if name.endswith("data/etc/jupyter/jupyter_server_config.d/tfos_nb.json"))
        enabled = json.loads(wheel.read(config))
        metadata = wheel.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    quickstart = [name for name in names if name.endswith("data/share/tfos_nb/notebooks/01_quickstart.ipynb")]
    assert len(quickstart) == 1, "python -m tfos_nb.demo runs it"
    assert [name for name in names if name.endswith("data/share/tfos_nb/kubernetes/kustomization.yaml")]
    assert enabled == {"ServerApp": {"jpserver_extensions": {"tfos_nb.serverext": True}}}
    assert f"\nVersion: {tfos_nb.__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "notebooks/"))]


def test_the_wheel_has_every_file_of_the_package(built: Path) -> None:
    kept = {".py", ".typed", ".js", ".css", ".html", ".svg"}
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tfos_nb").rglob("*") if path.suffix in kept]
    with zipfile.ZipFile(only(built, "*.whl")) as wheel:
        names = set(wheel.namelist())
    assert "tfos_nb/py.typed" in files
    assert sorted(set(files) - names) == []


def test_the_sdist_can_be_built_without_the_repository(built: Path) -> None:
    with tarfile.open(only(built, "*.tar.gz")) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    needed = {"LICENSE", "README.md", "pyproject.toml", "setup.py", "tfos_nb/spark/session.py", "tfos_nb/py.typed"}
    assert needed | {"jupyter-config/jupyter_server_config.d/tfos_nb.json"} <= names
    to_work_with = {"CHANGELOG.md", "Makefile", "constraints.txt", "docs/_toc.yml", "benchmarks/fleet.py"}
    assert to_work_with | {"tests/conftest.py", "tests/cluster_managers/programs/train_on_shared.py"} <= names
    assert not [name for name in names if name.endswith(".pyc")]


@pytest.mark.slow
def test_an_empty_environment_runs_the_quickstart(built: Path, tmp_path: Path) -> None:
    """A user without a checkout does this. It takes some minutes and downloads a gigabyte."""
    python, empty = tmp_path / "environment" / "bin" / "python", tmp_path / "empty"
    empty.mkdir()
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    wheel = only(built, "*.whl")

    def run(*command: str | Path) -> str:
        ended = subprocess.run(command, cwd=empty, env=own, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    run(sys.executable, "-m", "venv", python.parents[1])
    run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", f"{wheel}[demo]")
    assert "held-out digits are right" in run(python, "-m", "tfos_nb.demo")
    assert run(python, "-m", "tfos_nb.demo", "--copy", ".") == "jupyter lab 01_quickstart.ipynb\n"
    assert (empty / "01_quickstart.ipynb").is_file()
