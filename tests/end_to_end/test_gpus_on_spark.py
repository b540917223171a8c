"""Nodes with GPUs: Spark's own resources on a standalone cluster, and locks if Spark knows nothing of GPUs.

No GPU is needed: Spark's discovery script prints two addresses, and ``pynvml`` is a module with its documented names.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster_managers.standalone import standalone_cluster
from tests.conftest import PYTHONPATH, RunScript
from tfos_nb.runtime.host.gpu_claims import GpuClaims, GpusTaken

SESSION = """
    import argparse, json, os, sys
    from pyspark.sql import SparkSession
    import tfos_nb
    from tfos_nb.compat import TFCluster
    from tfos_nb.errors import TfosError

    def main(args, ctx):
        return os.environ["CUDA_VISIBLE_DEVICES"], os.environ["TF_FORCE_GPU_ALLOW_GROWTH"]

    def results(**plan):
        cluster = tfos_nb.launch(main, spark=spark, input_mode="tensorflow", **plan)
        cluster.wait(timeout=120)
        return cluster.results()

    def of_compat(args=None):
        cluster = TFCluster.run(spark.sparkContext, main, args, 2, 0)
        cluster.shutdown(timeout=120)
        return cluster.native.results()

    def refused(call):
        try:
            call()
        except TfosError as error:
            return f"{type(error).__name__}: {error}"

    def refusal(**plan):
        return refused(lambda: results(**plan))
"""

ON_STANDALONE = """
    spark = (
        SparkSession.builder.master(os.environ["TEST_MASTER"])
        .config("spark.driver.host", "127.0.0.1").config("spark.ui.enabled", "false")
        .config("spark.executor.cores", "4").config("spark.executor.memory", "1g")
        .config("spark.executor.resource.gpu.amount", "2").config("spark.task.resource.gpu.amount", "1")
        .getOrCreate()
    )
    told = {
        "mixed": results(workers=2, ps=1, evaluator=True, chief=False, gpus=1),
        "both": results(workers=1, gpus=2),
        "too_many": refusal(workers=3, gpus=1),
        "too_large": refusal(workers=1, gpus=3),
        "compat": of_compat(),
        "compat_none": of_compat(argparse.Namespace(num_gpus=0)),
    }
    print("told" + json.dumps(told))
"""

ON_LOCAL = """
    spark = SparkSession.builder.master("local[4]").config("spark.ui.enabled", "false").getOrCreate()
    told = {
        "two": results(workers=2, ps=1, chief=False, gpus=1),
        "again": results(workers=1, gpus=2),
        "too_many": refusal(workers=3, gpus=1),
        "alone": tfos_nb.parallel.run(main, nodes=2, gpus=1, spark=spark),
        "too_many_alone": refused(lambda: tfos_nb.parallel.run(main, nodes=3, gpus=1, spark=spark)),
    }
    print("told" + json.dumps(told))
"""

PYNVML = '''
    """Two GPUs, by pynvml's documented functions."""
    from types import SimpleNamespace

    UUIDS = ["GPU-aaaa", "GPU-bbbb"]

    def nvmlInit(): pass
    def nvmlShutdown(): pass
    def nvmlDeviceGetCount(): return len(UUIDS)
    def nvmlDeviceGetHandleByIndex(index): return UUIDS[index]
    def nvmlDeviceGetHandleByUUID(uuid): return uuid
    def nvmlDeviceGetUUID(handle): return handle
    def nvmlDeviceGetName(handle): return "Fake " + handle
    def nvmlDeviceGetComputeRunningProcesses(handle): return []
    def nvmlDeviceGetUtilizationRates(handle): return SimpleNamespace(gpu=50)
    def nvmlDeviceGetMemoryInfo(handle): return SimpleNamespace(used=1, total=2)
'''


def told_by(ended: subprocess.CompletedProcess[str]) -> dict[str, dict[str, list[str]]]:
    line = next(line for line in ended.stdout.splitlines() if line.startswith("told"))
    told: dict[str, dict[str, list[str]]] = json.loads(line.removeprefix("told"))
    return told


def devices(results: dict[str, list[str]], *nodes: str) -> list[str]:
    return sorted(results[node][0] for node in nodes)


@pytest.fixture(scope="module")
def master(spark_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A standalone cluster whose worker has two GPUs, according to its discovery script."""
    folder = tmp_path_factory.mktemp("standalone")
    discovery = folder / "gpus.sh"
    discovery.write_text('#!/bin/sh\necho \'{"name": "gpu", "addresses": ["0", "1"]}\'\n')
    discovery.chmod(0o755)
    conf = {"spark.worker.resource.gpu.amount": "2", "spark.worker.resource.gpu.discoveryScript": str(discovery)}
    with standalone_cluster(spark_home, folder, workers=1, cores=4, conf=conf) as cluster:
        yield cluster.url


@pytest.mark.slow
def test_spark_gives_each_worker_its_own_gpu_and_ps_and_evaluator_none(
    master: str, spark_home: Path, run_script: RunScript
) -> None:
    script = textwrap.dedent(SESSION) + textwrap.dedent(ON_STANDALONE)
    told = told_by(run_script(script, TEST_MASTER=master, PYSPARK_PYTHON=sys.executable))
    assert devices(told["mixed"], "worker:0", "worker:1") == ["0", "1"]
    assert devices(told["mixed"], "ps:0", "evaluator:0") == ["-1", "-1"]
    assert told["mixed"]["worker:0"][1] == "true"  # memory growth is on
    assert sorted(told["both"]["worker:0"][0].split(",")) == ["0", "1"]
    assert "PlanError: needs 3 slots (3 nodes with 1 GPU each)" in told["too_many"]
    assert "1 executor x 4 cores x 2 GPUs" in told["too_many"]
    assert "PlanError: gpus=3: an executor has 2" in told["too_large"]
    assert devices(told["compat"], "worker:0", "worker:1") == ["0", "1"]  # those of the task, without num_gpus
    assert devices(told["compat_none"], "worker:0", "worker:1") == ["-1", "-1"]


@pytest.mark.slow
def test_if_spark_knows_no_gpus_each_worker_takes_a_gpu_of_its_host(tmp_path: Path, run_script: RunScript) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "pynvml.py").write_text(textwrap.dedent(PYNVML))
    script = textwrap.dedent(SESSION) + textwrap.dedent(ON_LOCAL)
    told = told_by(run_script(script, PYTHONPATH=f"{packages}:{PYTHONPATH}", PYSPARK_PYTHON=sys.executable))
    assert devices(told["two"], "worker:0", "worker:1") == ["GPU-aaaa", "GPU-bbbb"]
    assert devices(told["two"], "ps:0") == ["-1"]
    assert sorted(told["again"]["worker:0"][0].split(",")) == ["GPU-aaaa", "GPU-bbbb"]
    assert "PlanError: gpus=1 for each of 3 nodes" in told["too_many"]
    assert "has 2" in told["too_many"]
    assert sorted(told["alone"]) == [["GPU-aaaa", "true"], ["GPU-bbbb", "true"]]
    assert "PlanError: gpus=1 for each of 3 nodes" in told["too_many_alone"]


class FakeNvml:
    """GPUs by name, and the processes that compute on them."""

    def __init__(self, **processes: list[int]) -> None:
        self.processes = processes

    def __getattr__(self, name: str) -> object:
        names = list(self.processes)
        return {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: len(names),
            "nvmlDeviceGetHandleByIndex": lambda index: names[index],
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}".encode(),  # older versions return bytes
            "nvmlDeviceGetComputeRunningProcesses": lambda handle: [
                type("Process", (), {"pid": pid}) for pid in self.processes[handle]
            ],
        }[name]


def test_a_gpu_on_which_another_process_computes_is_not_taken(tmp_path: Path) -> None:
    claims = GpuClaims(FakeNvml(a=[4711], b=[]), tmp_path)
    assert claims.take(1) == ("GPU-b",)
    claims.close()
    with pytest.raises(GpusTaken, match=r"GPU-a used by process 4711, GPU-b free"):
        claims.take(2, patience=0)


def test_a_gpu_has_one_node_at_a_time_and_is_free_when_that_node_ends(tmp_path: Path) -> None:
    first, second = (GpuClaims(FakeNvml(a=[], b=[]), tmp_path) for _ in range(2))
    assert first.take(1) == ("GPU-a",)
    assert second.take(1) == ("GPU-b",)
    second.close()
    with pytest.raises(GpusTaken, match="GPU-a held by another node"):
        second.take(2, patience=0)
    first.close()
    assert second.take(2) == ("GPU-a", "GPU-b")
    second.close()


def test_gpus_hidden_by_cuda_visible_devices_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(a=[], b=[], c=[])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-a")
    claims = GpuClaims(nvml, tmp_path)
    assert claims.take(2) == ("GPU-a", "GPU-c")
    claims.close()


def test_a_host_without_nvml_has_no_gpus(tmp_path: Path) -> None:
    assert len(GpuClaims(object(), tmp_path)) == 0
