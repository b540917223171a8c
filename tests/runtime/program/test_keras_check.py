"""A Keras that computes wrong numbers is detected by a short training and refused before a cluster starts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import pytest
from pyspark.sql import SparkSession

from tfos_nb import launch
from tfos_nb.driver import launching
from tfos_nb.errors import PlanError
from tfos_nb.runtime.keras.versions import installed_keras, is_tested
from tfos_nb.spark.contexts import context_of

CHECKOUT = Path(__file__).parents[3]
PROBE = (
    "import json; from tfos_nb.runtime.program.keras_check import KerasProbe\n"
    "print(json.dumps(next(KerasProbe()(iter([]))).to_pylist()[0]))"
)
KNOWN = "loss = self.optimizer.scale_loss(loss)"


def other_keras(folder: Path, version: str, step: str) -> Path:
    """Copy the installed Keras as another version whose step scales its loss differently."""
    copy = folder / "keras"
    shutil.copytree(Path(keras.__file__).parent, copy, ignore=shutil.ignore_patterns("*_test.py", "__pycache__"))
    told = copy / "src" / "version.py"
    told.write_text(told.read_text().replace(f'"{keras.__version__}"', f'"{version}"'))
    trainer = copy / "src" / "backend" / "tensorflow" / "trainer.py"
    assert trainer.read_text().count(KNOWN) == 1
    trainer.write_text(trainer.read_text().replace(KNOWN, step))
    return folder


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The answers of executors with a later Keras: a correct one, and one whose gradients depend on the replicas."""
    steps = {"right": KNOWN, "wrong": "loss = loss * self.distribute_strategy.num_replicas_in_sync"}
    processes = {}
    for name, step in steps.items():
        path = os.pathsep.join([str(other_keras(tmp_path_factory.mktemp(name), "3.99.0", step)), str(CHECKOUT)])
        environment = {**os.environ, "PYTHONPATH": path}
        processes[name] = subprocess.Popen(
            [sys.executable, "-c", PROBE], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    said = {name: process.communicate(timeout=600) for name, process in processes.items()}
    assert all(process.returncode == 0 for process in processes.values()), said
    return {name: json.loads(out.splitlines()[-1]) for name, (out, _) in said.items()}


@pytest.mark.slow
def test_a_later_keras_that_trains_to_the_right_numbers_is_accepted(probed: dict[str, dict[str, Any]]) -> None:
    assert probed["right"] == {"version": "3.99.0", "unlike": ""}


@pytest.mark.slow
def test_a_later_keras_that_trains_to_other_numbers_is_detected(probed: dict[str, dict[str, Any]]) -> None:
    assert probed["wrong"]["version"] == "3.99.0"
    assert "on two devices and" in probed["wrong"]["unlike"]


def test_the_checked_version_is_the_one_that_a_program_imports() -> None:
    assert installed_keras() == keras.__version__
    assert is_tested("3.12.4")
    assert is_tested("3.15.0")
    assert not is_tested("3.15.0.dev2026102704")
    assert not is_tested("3.120.0")


def test_a_wrong_keras_is_refused_before_a_cluster_starts(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "installed_keras", lambda: "3.99.0")  # the driver's, unknown version
    monkeypatch.setitem(launching._alike, str(context_of(spark).key), launching.advice("3.99.0", "a number is wrong"))
    with pytest.raises(PlanError, match=r"Keras 3\.99\.0 .*a number is wrong.* Install Keras 3\.12 or 3\.15, or"):
        launch(print, workers=2, spark=spark)


def test_an_executor_is_asked_if_the_drivers_version_is_not_known(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "installed_keras", lambda: "")
    monkeypatch.setattr(launching, "_alike", {})
    launching.check_keras(spark, launching.ClusterPlan(workers=2), {})
    assert launching._alike == {str(context_of(spark).key): ""}
    monkeypatch.setitem(launching._alike, str(context_of(spark).key), "it is wrong")
    with pytest.raises(PlanError, match=r"it is wrong\. TFOS_KERAS_CHECK=0 skips this check and launches"):
        launching.check_keras(spark, launching.ClusterPlan(workers=2), {})


@pytest.mark.parametrize(
    ("plan", "env"),
    [
        ({"workers": 1}, {}),
        ({"workers": 2, "ps": 1, "chief": True, "input_mode": "tensorflow"}, {}),
        ({"workers": 2}, {"TF_USE_LEGACY_KERAS": "1"}),
    ],
)
def test_keras_is_not_checked_without_training_on_several_replicas(
    plan: dict[str, Any], env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "installed_keras", lambda: "3.99.0")
    launching.check_keras(None, launching.ClusterPlan(**plan), env)  # type: ignore[arg-type]  # Spark is not used


def test_an_environment_variable_skips_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "installed_keras", lambda: "3.99.0")
    monkeypatch.setenv("TFOS_KERAS_CHECK", "0")
    launching.check_keras(None, launching.ClusterPlan(workers=2), {})  # type: ignore[arg-type]
