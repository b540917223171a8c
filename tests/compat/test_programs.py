"""Programs in TensorFlowOnSpark's style, which differ only in their imports: each runs in a separate process.

They run with one slot an executor and as many nodes as slots, as TensorFlowOnSpark requires.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ENVIRONMENT
from tfos_nb.spark.java import find_java

PROGRAMS = Path(__file__).parent / "programs"
MASTER = "local-cluster[2,1,1024]"
SECONDS = 240

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """scikit-learn's digits as CSV, label first, in files of 300 rows."""
    sklearn = pytest.importorskip("sklearn.datasets")
    folder: Path = tmp_path_factory.mktemp("digits")
    images, labels = sklearn.load_digits(return_X_y=True)
    lines = [",".join(str(int(x)) for x in [label, *image]) for image, label in zip(images, labels, strict=True)]
    for part, start in enumerate(range(0, len(lines), 300)):
        (folder / f"part-{part:05d}").write_text("\n".join(lines[start : start + 300]) + "\n")
    return folder


@pytest.fixture(scope="module")
def exported(digits: Path, spark_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the training program exports and the others apply."""
    folder: Path = tmp_path_factory.mktemp("export") / "model"
    said = run("mnist_spark.py", spark_home, "--images_labels", digits, "--export_dir", folder)
    assert "trained" in said
    return folder


def run(program: str, home: Path, *arguments: object) -> str:
    environment = {
        **ENVIRONMENT,
        "SPARK_HOME": str(home),
        "JAVA_HOME": str(find_java().home),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_SUBMIT_ARGS": "--conf spark.ui.enabled=false --conf spark.driver.host=127.0.0.1 pyspark-shell",
    }
    command = [sys.executable, str(PROGRAMS / program), MASTER, *map(str, arguments)]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False, cwd=home
    )
    begin = max(ended.stderr.find("Traceback (most recent call last)"), 0)  # skip what Spark logs at its end
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr[begin : begin + 6000]}"
    return ended.stdout


def accuracy(folder: Path) -> tuple[float, int]:
    lines = [line for file in sorted(folder.glob("part-*")) for line in file.read_text().splitlines()]
    return sum(line.split()[0] == line.split()[1] for line in lines) / len(lines), len(lines)


def test_the_training_program_exports_its_model(exported: Path) -> None:
    assert (exported / "saved_model.pb").exists()
    assert os.listdir(exported / "variables")


def test_the_inference_program_divides_the_files_among_executors(
    exported: Path, digits: Path, spark_home: Path, tmp_path: Path
) -> None:
    said = run(
        "mnist_inference.py",
        spark_home,
        "--images_labels",
        digits,
        "--export_dir",
        exported,
        "--output",
        tmp_path / "o",
    )
    assert "scored" in said
    right, rows = accuracy(tmp_path / "o")
    assert rows == 1797
    assert right > 0.8
    assert len(list((tmp_path / "o").glob("part-*"))) == 2
    assert all(line.endswith(" alone") for line in (tmp_path / "o" / "part-00000").read_text().splitlines())


def test_inference_through_the_cluster_returns_one_line_per_row_in_order(
    exported: Path, digits: Path, spark_home: Path, tmp_path: Path
) -> None:
    files = sorted(digits.glob("part-*"))
    listed = ",".join(map(str, files))  # Hadoop may list a folder's files in another order
    arguments = ("--images_labels", listed, "--export_dir", exported, "--output", tmp_path / "o")
    assert "answered" in run("mnist_feed_inference.py", spark_home, *arguments)
    right, rows = accuracy(tmp_path / "o")
    assert rows == 1797
    assert right > 0.8
    given = [line.split(",")[0] for file in files for line in file.read_text().splitlines()]
    got = [
        line.split()[0] for file in sorted((tmp_path / "o").glob("part-*")) for line in file.read_text().splitlines()
    ]
    assert got == given
