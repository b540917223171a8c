"""The examples: each script has the same program as its notebook, and learns from small data."""

from __future__ import annotations

import ast
import dis
import gzip
import importlib.util
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from tests.conftest import ENVIRONMENT
from tfos_nb.spark.java import find_java

CHECKOUT = Path(__file__).parents[2]
EXAMPLES = CHECKOUT / "notebooks/examples"
NAMES = [
    "mnist",
    "cifar10_resnet",
    "flowers_inception",
    "segmentation_unet",
    "text_lstm",
    "wide_and_deep",
]
RUN_SECONDS = 400
MNIST = os.environ.get("TFOS_NB_MNIST", "")
"""A folder with MNIST's own files, where somebody has them; else the tests make such files."""

Outcome = dict[str, Any]


# --- one program --------------------------------------------------------------------------------------------------


def cells_of(name: str) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return cells


def parts_of(text: str) -> dict[str, str]:
    """Return the parsed functions, classes and constants of a source text."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = ast.dump(node)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper():
            found[node.targets[0].id] = ast.dump(node)
    return found


def parts_of_notebook(name: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for cell in cells_of(name):
        lines = [line for line in cell["source"] if not line.startswith("%")]
        if cell["cell_type"] == "code":
            found.update(parts_of("".join(lines)))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_cluster_cell_has_the_scripts_main(name: str) -> None:
    (cell,) = [cell for cell in cells_of(name) if "".join(cell["source"]).startswith("%%tfos_cluster")]
    told = parts_of("".join(cell["source"][1:]))
    assert list(told) == ["main"]
    assert told["main"] == parts_of((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))["main"]


@pytest.mark.parametrize("name", NAMES)
def test_definitions_in_both_script_and_notebook_are_the_same(name: str) -> None:
    script, notebook = parts_of((EXAMPLES / f"{name}.py").read_text(encoding="utf-8")), parts_of_notebook(name)
    both = script.keys() & notebook.keys()
    assert {"main", "frame", "score"} <= both
    assert {part: script[part] for part in both} == {part: notebook[part] for part in both}


@pytest.mark.parametrize("name", NAMES)
def test_fewer_than_ten_lines_of_main_use_ctx(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    main = next(n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == "main")
    lines = text.splitlines()[main.lineno - 1 : main.end_lineno]
    assert 3 < sum("ctx" in line for line in lines) < 10


@pytest.mark.parametrize("name", NAMES)
def test_main_refers_to_nothing_outside_itself(name: str) -> None:
    main = vars(loaded(name))["main"]
    inner = [main.__code__]
    for code in inner:
        inner.extend(constant for constant in code.co_consts if hasattr(constant, "co_names"))
    defined = set(vars(loaded(name))) - set(vars(__import__("builtins")))
    assert not defined & {global_name for code in inner for global_name in globals_of(code)}


def globals_of(code: Any) -> set[str]:
    return {op.argval for op in dis.get_instructions(code) if op.opname == "LOAD_GLOBAL"}


@pytest.mark.parametrize("name", NAMES)
def test_the_notebook_is_shipped_without_outputs_and_each_cell_has_a_name(name: str) -> None:
    cells = cells_of(name)
    assert not [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count")]
    assert len({cell["id"] for cell in cells}) == len(cells)


def test_the_table_names_every_example() -> None:
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for name in NAMES:
        assert f"[{name}.py]({name}.py)" in table
        assert f"[notebook]({name}.ipynb)" in table


def loaded(name: str) -> ModuleType:
    """Import a script under a separate module name."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- a notebook that is submitted -------------------------------------------------------------------------------------


def run_notebook(folder: Path, source: str, target: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "run_notebook.py"), source, target]
    return subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
    )


def write_notebook(folder: Path, cell: str) -> str:
    nbformat.write(new_notebook(cells=[new_code_cell(cell)]), folder / "given.ipynb")
    return "given.ipynb"


def test_the_target_notebook_is_written_with_its_folder_and_outputs(tmp_path: Path) -> None:
    ended = run_notebook(tmp_path, write_notebook(tmp_path, "print(6 * 7)"), "new/folder/done.ipynb")
    assert ended.returncode == 0, ended.stderr
    (cell,) = nbformat.read(tmp_path / "new/folder/done.ipynb", 4)["cells"]
    assert cell["outputs"][0]["text"] == "42\n"


def test_a_target_that_cannot_be_written_is_refused_before_the_first_cell(tmp_path: Path) -> None:
    source = write_notebook(tmp_path, "open('executed', 'w').close()")
    for target, why in (("given.ipynb/done.ipynb", ""), (".", "Is a directory")):
        ended = run_notebook(tmp_path, source, target)
        assert ended.returncode == 2
        assert f"error: {target} cannot be written: {why}" in ended.stderr.splitlines()[-1]
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "given.txt: No such file or directory"),
        ("words\n", "given.txt is no notebook: Notebook does not appear to be JSON"),
        ("{}", "given.txt is no notebook: "),
        ("[]", "given.txt is no notebook: its JSON is of another kind"),
    ],
)
def test_an_invalid_source_is_refused_in_one_line_and_the_target_is_unchanged(
    text: str | None, told: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "given.txt").write_text(text)
    (tmp_path / "done.ipynb").write_text("as it was")
    ended = run_notebook(tmp_path, "given.txt", "done.ipynb")
    assert ended.returncode == 2
    assert f"error: {told}" in ended.stderr.splitlines()[-1]
    assert (tmp_path / "done.ipynb").read_text() == "as it was"


# --- scripts --------------------------------------------------------------------------------------------------------


def run(folder: Path, name: str, *options: str, by: tuple[str, ...] = (sys.executable,)) -> Outcome:
    """Run a script in ``folder``; return the JSON of its last line."""
    environment = {**ENVIRONMENT, "PYSPARK_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "-1"}
    ended = subprocess.run(
        [*by, str(EXAMPLES / f"{name}.py"), *options],
        cwd=folder,
        env={**environment, "JAVA_HOME": str(find_java().home), "SPARK_LOCAL_IP": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    outcome: Outcome = json.loads(ended.stdout.splitlines()[-1])
    assert outcome["example"] == name
    assert outcome["model"] in "\n".join(ended.stdout.splitlines()[:-1])
    return outcome


def learns(outcome: Outcome, epochs: int) -> bool:
    """Whether every epoch was reported, and the last loss is lower than the first."""
    told = outcome["epochs"]
    return [epoch["epoch"] for epoch in told] == list(range(1, epochs + 1)) and told[-1]["loss"] < told[0]["loss"]


def write_idx(path: Path, array: np.ndarray[Any, Any]) -> None:
    head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    data = head + array.astype("uint8").tobytes()
    path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)


@pytest.fixture(scope="module")
def idx_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MNIST's files, or files of that format with enlarged digits of 8 x 8 pixels; some of them are compressed."""
    if MNIST:
        return Path(MNIST)
    from sklearn.datasets import load_digits

    bunch, folder = load_digits(), tmp_path_factory.mktemp("idx")
    images = np.zeros((len(bunch.target), 28, 28))
    images[:, 2:26, 2:26] = bunch.images.repeat(3, axis=1).repeat(3, axis=2) * 15
    for kind, part in (("train", slice(0, 1500)), ("t10k", slice(1500, None))):
        write_idx(folder / f"{kind}-images-idx3-ubyte.gz", images[part])
        write_idx(folder / f"{kind}-labels-idx1-ubyte", bunch.target[part])
    return folder


def test_a_folder_without_mnists_files_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        vars(loaded("mnist"))["parse"](["--data", str(tmp_path)])
    assert refused.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"error: --data {tmp_path}: no folder with MNIST's IDX files (t10k-images-idx3-ubyte, …)")


def test_a_folder_with_mnists_files_is_accepted(idx_files: Path) -> None:
    for data in (str(idx_files), "scikit-learn", "keras"):
        assert vars(loaded("mnist"))["parse"](["--data", data])["data"] == data


@pytest.mark.slow
def test_mnist_learns_from_fed_rows_under_spark_submit(tmp_path: Path, idx_files: Path) -> None:
    submit = Path(sys.executable).parent / "spark-submit"
    by = (str(submit), "--master", "local[4]", "--conf", "spark.ui.enabled=false")
    outcome = run(tmp_path, "mnist", "--data", str(idx_files), "--epochs", "3", "--width", "8", by=by)
    assert learns(outcome, 3)
    assert outcome["held_out"] >= 290
    assert outcome["accuracy"] > 0.6


@pytest.mark.slow
def test_mnist_learns_from_parquet_files_that_the_nodes_read(tmp_path: Path, idx_files: Path) -> None:
    options = ("--input", "tensorflow", "--data", str(idx_files), "--epochs", "3", "--width", "8", "--model-dir", "out")
    outcome = run(tmp_path, "mnist", *options)
    assert learns(outcome, 3)
    assert outcome["accuracy"] > 0.6
    assert list(tmp_path.glob("out/rows/*.parquet"))
    assert outcome["model"] == str(tmp_path / "out/model.keras")


@pytest.fixture(scope="module")
def bin_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files in CIFAR-10's binary format: noise with stripes whose brightness and colour depend on the class."""
    folder, chance = tmp_path_factory.mktemp("cifar10"), np.random.default_rng(5)
    for name, count in (("data_batch_1.bin", 200), ("data_batch_2.bin", 200), ("test_batch.bin", 100)):
        records = []
        for label in chance.integers(0, 10, count).tolist():
            planes = chance.integers(90, 160, (3, 32, 32))
            planes[label % 3, 10:22, :] = 20 if label < 5 else 250
            planes[(label + label // 3) % 3, :, 10:22] = 250 if label % 2 else 0
            records.append(bytes([label]) + planes.astype("uint8").tobytes())
        (folder / name).write_bytes(b"".join(records))
    return folder


@pytest.mark.slow
def test_cifar10_learns_from_files_of_fixed_records(tmp_path: Path, bin_files: Path) -> None:
    assert (bin_files / "test_batch.bin").stat().st_size == 100 * 3073
    small = ("--epochs", "5", "--width", "8", "--blocks", "1", "--batch-size", "20", "--rate", "0.05")
    outcome = run(tmp_path, "cifar10_resnet", "--data", str(bin_files), *small)
    assert learns(outcome, 5)
    assert outcome["held_out"] == 100
    assert outcome["accuracy"] > 0.4


@pytest.mark.slow
def test_inception_modules_learn_from_tfrecords_of_flowers(tmp_path: Path) -> None:
    loaded("flowers_inception").draw_flowers(tmp_path / "flowers", count=60, seed=3, size=48)
    small = ("--size", "32", "--width", "0.125", "--modules", "1", "--epochs", "6", "--batch-size", "16")
    outcome = run(tmp_path, "flowers_inception", "--data", "flowers", "--records", "records", *small)
    assert outcome["kinds"] == ["daisy", "rose", "sunflower", "tulip"]
    assert learns(outcome, 6)
    assert 25 < outcome["held_out"] < 75
    assert outcome["accuracy"] > 0.6
    assert list(tmp_path.glob("records/part-*"))


@pytest.mark.slow
def test_a_unet_finds_the_pixels_of_pets(tmp_path: Path) -> None:
    loaded("segmentation_unet").draw_pets(tmp_path / "pets", count=150, seed=3, size=32)
    small = ("--size", "32", "--levels", "2", "--width", "8", "--epochs", "6", "--batch-size", "8")
    outcome = run(tmp_path, "segmentation_unet", "--data", "pets", *small)
    assert learns(outcome, 6)
    assert 15 < outcome["held_out"] < 50
    assert outcome["iou"]["pet"] > 0.6
    assert outcome["iou"]["background"] > 0.6


@pytest.mark.slow
def test_an_lstm_distinguishes_praise_from_blame_by_the_order_of_words(tmp_path: Path) -> None:
    loaded("text_lstm").make_reviews(tmp_path / "reviews.tsv", rows=2000, seed=3)
    outcome = run(tmp_path, "text_lstm", "--data", "reviews.tsv", "--epochs", "8", "--length", "14")
    assert learns(outcome, 8)
    assert 300 < outcome["held_out"] < 500
    assert outcome["accuracy"] > 0.8


@pytest.fixture(scope="module")
def census(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("census") / "adult.data"
    loaded("wide_and_deep").make_census(path, rows=2500, seed=3)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("ps", [0, 1])
def test_wide_and_deep_learns_synchronously_and_with_parameter_servers(tmp_path: Path, census: str, ps: int) -> None:
    outcome = run(tmp_path, "wide_and_deep", "--data", census, "--epochs", "3", "--ps", str(ps))
    assert learns(outcome, 3)
    assert 400 < outcome["held_out"] < 600
    assert outcome["accuracy"] > outcome["guess"] + 0.1


# --- notebooks ------------------------------------------------------------------------------------------------------


def said_by_notebook(name: str, folder: Path) -> str:
    """Run a notebook without real data; return the output of its cells."""
    content = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    environment = {**ENVIRONMENT, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": os.fspath(CHECKOUT)}
    for variable in [name for name in environment if name.startswith("TFOS_NB_")]:
        del environment[variable]
    client = NotebookClient(content, timeout=RUN_SECONDS, resources={"metadata": {"path": os.fspath(folder)}})
    with (folder / "kernel.log").open("wb") as log:
        client.execute(env=environment, stdout=log, stderr=log)
    outputs = [output for cell in content.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("text/html" in output.get("data", {}) for output in outputs[-1:])
    return "".join(output.get("text", "") for output in outputs)


def held_out_percent(said: str) -> float:
    (line,) = [line for line in said.splitlines() if "held-out" in line and "are right" in line][:1]
    return float(line.partition("%")[0])


@pytest.mark.slow
def test_the_notebook_of_reviews_runs_offline_and_learns(tmp_path: Path) -> None:
    assert held_out_percent(said_by_notebook("text_lstm", tmp_path)) > 75


@pytest.mark.slow
def test_the_notebook_of_the_census_runs_offline_and_learns(tmp_path: Path) -> None:
    assert held_out_percent(said_by_notebook("wide_and_deep", tmp_path)) > 75


@pytest.mark.slow
@pytest.mark.parametrize(("name", "percent"), [("mnist", 90), ("cifar10_resnet", 40), ("flowers_inception", 60)])
def test_the_notebooks_of_pictures_run_offline_and_learn(tmp_path: Path, name: str, percent: float) -> None:
    assert held_out_percent(said_by_notebook(name, tmp_path)) > percent


@pytest.mark.slow
def test_the_notebook_of_pets_runs_offline_and_learns(tmp_path: Path) -> None:
    said = said_by_notebook("segmentation_unet", tmp_path)
    assert float(said.partition("held-out pictures: pet ")[2].partition(",")[0]) > 0.6
