"""Several hosts, each a network namespace: they exchange rows, gradients and heartbeats, and lose their network.

There are three hosts. Most tests train on two of them.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster_managers.daemons import Daemon
from tests.cluster_managers.hosts import Host, Network, bytes_on, cut_link, network, slow_link, why_not, why_not_slow
from tests.cluster_managers.standalone import Standalone, standalone_cluster
from tests.cluster_managers.submit import PROGRAMS, as_options, outcome, printed, submitted
from tests.conftest import PYTHONPATH
from tests.faults import sum_of_ids
from tests.waiting import until

pytestmark = pytest.mark.standalone


@pytest.fixture(scope="module")
def wires(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    if reason := why_not():
        pytest.skip(reason)
    with network(3, str(tmp_path_factory.mktemp("disk"))) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(wires: Network, spark_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    folder = tmp_path_factory.mktemp("hosts")
    with standalone_cluster(spark_home, folder, workers=3, cores=2, network=wires) as running:
        yield running


@pytest.fixture
def limited() -> None:
    """Skip a test where the kernel cannot limit a rate."""
    if reason := why_not_slow():
        pytest.skip(reason)


# While a link is cut, Spark reads a broadcast block from an executor that does not answer. It would wait for
# spark.network.timeout, 120 s, before it reads the block elsewhere.
SOON_ELSEWHERE = {
    "spark.shuffle.io.connectionTimeout": "5s",
    "spark.shuffle.io.connectionCreationTimeout": "5s",
    "spark.shuffle.io.maxRetries": "0",
}


def arguments(wires: Network, cluster: Standalone, root: Path, epochs: int, **options: Any) -> list[str]:
    """Return the arguments of a training on two hosts, or on three with ``workers=3``."""
    program = [str(PROGRAMS / "lose_a_host.py"), str(root), str(epochs), json.dumps(options)]
    three = {"spark.cores.max": "6", **SOON_ELSEWHERE} if options.get("workers") == 3 else {}
    return [*of_spark(wires, cluster, **three), *program]


def of_spark(wires: Network, cluster: Standalone, **more: str) -> list[str]:
    settings = {
        "spark.driver.host": wires.address,
        "spark.driver.bindAddress": wires.address,
        "spark.executor.cores": "2",
        "spark.cores.max": "4",
        "spark.executor.memory": "640m",
        "spark.driver.memory": "640m",
        "spark.executorEnv.PYTHONPATH": PYTHONPATH,
        "spark.ui.enabled": "false",
        "spark.task.maxFailures": "100",
        **more,
    }
    return ["--master", cluster.url, *as_options(settings)]


def environment(wires: Network) -> dict[str, str]:
    return {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": wires.address, "PYTHONPATH": PYTHONPATH}


def said(running: Daemon, pattern: str) -> bool:
    """Wait until the driver has logged something; False if it has ended before."""

    def looks() -> bool:
        return running.ended or bool(re.search(pattern, running.log.read_text(errors="replace")))

    return until(looks, 180, every=0.2) and not running.ended


def results_of(running: Daemon) -> dict[str, Any]:
    outcome(running)
    return printed(running.log.read_text(errors="replace"))


def saved_once(root: Path, running: Daemon) -> bool:
    return until(lambda: running.ended or any(root.glob("models/checkpoints/*/00000001/place.json")), 180, every=0.2)


def hosts_of(wires: Network, root: Path) -> dict[str, Host]:
    """Return the host of each worker, once the program has told it."""
    by_address = {host.address: host for host in wires.hosts}
    return {node: by_address[address] for node, address in json.loads((root / "hosts.json").read_text()).items()}


def supervisors(host: Host) -> set[int]:
    return {pid for pid, module in host.of_tfos_nb().items() if module == "tfos_nb.runtime.node.supervisor"}


def cut_off_until_said(host: Host, running: Daemon, pattern: str) -> None:
    """Disconnect a host in the middle of the training, until the driver has logged something."""
    host.cut_off()
    try:
        assert said(running, pattern), running.tail
    finally:
        host.connect()


@pytest.mark.slow
def test_nodes_on_two_hosts_train_synchronously_over_a_slow_link(
    wires: Network, cluster: Standalone, spark_home: Path, tmp_path: Path, limited: None
) -> None:
    given = arguments(wires, cluster, tmp_path, 2)
    with ExitStack() as slow, submitted(given, environment(wires), tmp_path, spark_home) as running:
        for host in wires.hosts[:2]:  # of any two of the three hosts, at least one is slow
            slow.enter_context(host.slow("20mbit"))
        found = results_of(running)
    assert len(set(found["hosts"].values())) == 2
    assert set(map(tuple, found["results"].values())) == {(sum_of_ids(2), 1)}


def test_training_continues_without_a_disconnected_host_which_joins_again_later(
    wires: Network, cluster: Standalone, spark_home: Path, tmp_path: Path
) -> None:
    epochs, options = 12, {"restarts": 3, "min_workers": 1, "heartbeat_timeout": 4.0}
    given = arguments(wires, cluster, tmp_path, epochs, **options)
    with submitted(given, environment(wires), tmp_path, spark_home) as running:
        assert saved_once(tmp_path, running), running.tail
        cut_off_until_said(hosts_of(wires, tmp_path)["worker:1"], running, r"continues without worker:")
        assert said(running, r"changes: worker:. joined"), running.tail
        found = results_of(running)
    assert {total for total, _ in found["results"].values()} == {sum_of_ids(epochs)}, "each row once an epoch"
    assert len(found["results"]) == 2


@pytest.mark.slow
def test_nodes_that_wait_for_a_disconnected_host_continue_when_it_is_back(
    wires: Network, cluster: Standalone, spark_home: Path, tmp_path: Path
) -> None:
    epochs, options = 3, {"restarts": 3, "heartbeat_timeout": 4.0}
    given = arguments(wires, cluster, tmp_path, epochs, **options)
    with submitted(given, environment(wires), tmp_path, spark_home) as running:
        assert saved_once(tmp_path, running), running.tail
        cut_off_until_said(hosts_of(wires, tmp_path)["worker:0"], running, r"no heartbeat for 4 s")
        found = results_of(running)
    assert {total for total, _ in found["results"].values()} == {sum_of_ids(epochs)}


@pytest.mark.slow
def test_a_model_dir_on_each_hosts_own_disk_is_refused_before_any_row_is_trained(
    wires: Network, cluster: Standalone, spark_home: Path, tmp_path: Path
) -> None:
    """The program would save nothing there before its end."""
    given = arguments(wires, cluster, tmp_path, 2, model_dir=f"{wires.hosts[0].disk}/models", program="counting_fit")
    with submitted(given, environment(wires), tmp_path, spark_home) as running:
        assert until(lambda: running.ended, 180, every=0.2), running.tail
    told = running.log.read_text(errors="replace")
    assert re.search(
        rf"PlanError: worker:. on .* and worker:. on .* see different directories at {wires.hosts[0].disk}", told
    )
    assert "epoch 0" not in told, "it was not begun"


@pytest.mark.slow
def test_nothing_is_left_on_hosts_that_no_longer_reach_the_driver(
    wires: Network, cluster: Standalone, spark_home: Path, tmp_path: Path
) -> None:
    """They get no message, only no acknowledgements. With ``restarts`` the supervisors outlive the processes.

    The warm process of an executor stays as long as that, which Spark ends after minutes.
    """
    given = arguments(wires, cluster, tmp_path, 1000, restarts=3, heartbeat_timeout=4.0)
    with ExitStack() as afterwards, submitted(given, environment(wires), tmp_path, spark_home) as running:
        assert saved_once(tmp_path, running), running.tail
        hosts = list(hosts_of(wires, tmp_path).values())
        stay = {pid for host in hosts for pid in warm_servers(host)}
        there = [{pid: module for pid, module in host.of_tfos_nb().items() if pid not in stay} for host in hosts]
        assert all("tfos_nb.runtime.node.supervisor" in modules.values() for modules in there), there
        for host in hosts:
            afterwards.callback(host.connect)
            host.cut_off()
        # The timeout, and the time to end a process. gRPC alone would take ten seconds to notice.
        until(lambda: not left_of(wires, there, stay), 4.0 + 5.0, every=0.1)
        assert not left_of(wires, there, stay)
        assert not running.ended, "the driver is another matter"


def not_reached(hosts: dict[str, Host], one: str, other: str) -> str:
    """Return a pattern of the text about two workers that do not reach each other."""
    named = " and ".join(f"{name} on {re.escape(hosts[name].address)}" for name in (one, other))
    return f"{named} do not reach each other, though the driver reaches both"


def test_training_continues_without_one_of_two_workers_that_do_not_reach_each_other(
    wires: Network, cluster: Standalone, spark_home: Path, tmp_path: Path
) -> None:
    """TensorFlow alone would wait for a quarter of an hour. Tasks on the cut-off host cannot feed both workers."""
    epochs, options = 2, {"workers": 3, "restarts": 3, "min_workers": 2, "heartbeat_timeout": 4.0}
    given = arguments(wires, cluster, tmp_path, epochs, **options)
    with submitted(given, environment(wires), tmp_path, spark_home) as running:
        assert saved_once(tmp_path, running), running.tail
        hosts = hosts_of(wires, tmp_path)
        before = {node: supervisors(host) for node, host in hosts.items()}
        with cut_link(hosts["worker:1"], hosts["worker:2"]):
            told = f"continues without worker:2: .*{not_reached(hosts, 'worker:1', 'worker:2')}"
            assert said(running, told), running.tail
            assert [supervisors(hosts[node]) == before[node] for node in ("worker:0", "worker:1")] == [True, True]
            found = results_of(running)
    assert found["results"] == {node: [sum_of_ids(epochs), 2] for node in ("worker:0", "worker:1")}


@pytest.mark.slow
def test_a_worker_that_was_left_out_joins_when_its_link_is_back(
    wires: Network, cluster: Standalone, spark_home: Path, tmp_path: Path
) -> None:
    """The link to TensorFlow's leader is cut: TensorFlow ends all processes, and says only that a task is unhealthy."""
    epochs, options = 16, {"workers": 3, "restarts": 3, "min_workers": 2, "heartbeat_timeout": 4.0}
    given = arguments(wires, cluster, tmp_path, epochs, **options)
    with submitted(given, environment(wires), tmp_path, spark_home) as running:
        assert saved_once(tmp_path, running), running.tail
        hosts = hosts_of(wires, tmp_path)
        with cut_link(hosts["worker:0"], hosts["worker:2"]):
            told = f"continues without worker:2: .*{not_reached(hosts, 'worker:0', 'worker:2')}"
            assert said(running, told), running.tail
            assert until(lambda: running.ended or any(tmp_path.glob("models/checkpoints/*/00000003/place.json")), 120)
            assert "joined" not in running.log.read_text(errors="replace"), "it would be cut off again"
        assert said(running, r"changes: worker:2 joined"), running.tail
        found = results_of(running)
    assert found["results"] == {node: [sum_of_ids(epochs), 3] for node in hosts}


@pytest.mark.slow
def test_all_workers_wait_for_a_cut_link_and_continue_when_it_is_back(
    wires: Network, cluster: Standalone, spark_home: Path, tmp_path: Path
) -> None:
    epochs, options = 3, {"workers": 3, "restarts": 3, "heartbeat_timeout": 4.0}
    given = arguments(wires, cluster, tmp_path, epochs, **options)
    with submitted(given, environment(wires), tmp_path, spark_home) as running:
        assert saved_once(tmp_path, running), running.tail
        hosts = hosts_of(wires, tmp_path)
        with cut_link(hosts["worker:1"], hosts["worker:2"]):
            told = f"until its nodes reach each other: .*{not_reached(hosts, 'worker:1', 'worker:2')}"
            assert said(running, told), running.tail
        found = results_of(running)
    assert found["results"] == {node: [sum_of_ids(epochs), 2] for node in hosts}


@pytest.mark.slow
@pytest.mark.parametrize("pair", [("worker:0", "worker:1"), ("worker:1", "worker:2")], ids=["of-the-leader", "other"])
def test_a_link_that_stays_cut_is_named_in_the_error(
    wires: Network, cluster: Standalone, spark_home: Path, tmp_path: Path, pair: tuple[str, str]
) -> None:
    options = {"workers": 3, "restarts": 3, "heartbeat_timeout": 4.0, "rendezvous_timeout": 30.0}
    given = arguments(wires, cluster, tmp_path, 1000, **options)
    with submitted(given, environment(wires), tmp_path, spark_home) as running:
        assert saved_once(tmp_path, running), running.tail
        hosts = hosts_of(wires, tmp_path)
        with cut_link(hosts[pair[0]], hosts[pair[1]]):
            assert until(lambda: running.ended, 120, every=0.2), running.tail
    assert re.search(f"NodeFailed: .*{not_reached(hosts, *pair)}", running.log.read_text(errors="replace"))


@pytest.mark.slow
def test_a_link_that_is_cut_before_the_first_step_is_named(
    wires: Network, cluster: Standalone, spark_home: Path, tmp_path: Path
) -> None:
    """As with a firewall between executors."""
    given = arguments(wires, cluster, tmp_path, 2, workers=3, restarts=0)
    with (
        cut_link(wires.hosts[0], wires.hosts[1]),
        submitted(given, environment(wires), tmp_path, spark_home) as running,
    ):
        assert until(lambda: running.ended, 240, every=0.2), running.tail
    told = running.log.read_text(errors="replace")
    assert re.search(r"NodeFailed: .*worker:. on .* and worker:. on .* do not reach each other", told), running.tail


@pytest.mark.slow
def test_nodes_train_over_a_slow_link_between_two_of_them(
    wires: Network, cluster: Standalone, spark_home: Path, tmp_path: Path, limited: None
) -> None:
    given = arguments(wires, cluster, tmp_path, 2, workers=3)
    with (
        slow_link(wires.hosts[0], wires.hosts[1], "2mbit"),
        submitted(given, environment(wires), tmp_path, spark_home) as running,
    ):
        found = results_of(running)
        assert min(bytes_on(host) for host in wires.hosts[:2]) > 100_000, "they used the cable"
    assert found["results"] == {f"worker:{number}": [sum_of_ids(2), 1] for number in range(3)}
    assert set(found["hosts"].values()) == {host.address for host in wires.hosts}


SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.minTaskRuntime": "200ms",
    "spark.speculation.quantile": "0.1",
    "spark.speculation.multiplier": "1.1",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "1000",
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [False, True], ids=["the-same-rows", "in-another-order"])
def test_rows_of_a_task_that_spark_runs_twice_at_once_are_fed_once_or_refused(
    wires: Network, cluster: Standalone, spark_home: Path, tmp_path: Path, changes: bool
) -> None:
    """Spark starts the second attempt of a slow task on another host, while the first one still sends."""
    given = [*of_spark(wires, cluster, **SPECULATION), str(PROGRAMS / "speculate.py"), str(tmp_path), str(int(changes))]
    with submitted(given, environment(wires), tmp_path, spark_home) as running:
        if changes:
            assert until(lambda: running.ended, 180, every=0.2), running.tail
            told = running.log.read_text(errors="replace")
            assert "FeedFailed: partition 0 gave other rows when Spark ran it again" in told, running.tail
        else:
            found = results_of(running)
            assert set(map(tuple, found["results"].values())) == {(sum_of_ids(1, 80_000), 1)}
    assert {path.name for path in tmp_path.glob("attempt-*")} == {"attempt-0", "attempt-1"}, "Spark has speculated"


def warm_servers(host: Host) -> set[int]:
    """Return the executors' warm processes on a host; those of nodes, which they have forked, run the same module."""
    warm = {pid for pid, module in host.of_tfos_nb().items() if module == "tfos_nb.runtime.node.warm_process"}
    return {pid for pid in warm if psutil.Process(pid).ppid() not in warm}


def left_of(wires: Network, there: list[dict[int, str]], stay: set[int]) -> list[str]:
    """Return the processes on the hosts but those that stay, and the directories of processes that ran there."""
    found = [one for host in wires.hosts for one in host.of_tfos_nb().items()]
    modules = [f"{pid} {module}" for pid, module in found if pid not in stay]
    theirs = tuple(f"-{pid}-" for processes in there for pid in processes)
    names = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("tfos_nb-")]
    return modules + [name for name in names if any(mark in name for mark in theirs)]
