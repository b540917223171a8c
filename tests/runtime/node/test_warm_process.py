"""An application's warm server: its forks behave like fresh processes, and only authorized callers get one."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import RunScript
from tests.faults import its_supervisor, its_warm_process
from tests.runtime.node.test_supervisor import Node
from tests.waiting import until
from tfos_nb.runtime.control import wire
from tfos_nb.runtime.node import warm_process
from tfos_nb.runtime.node.warm_process import Environment, Fork, ServerTerms, WarmProcess

Start = Callable[..., Node]


@pytest.fixture(scope="module")
def anchor() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands in for an executor's JVM."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10_000)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def root(anchor: subprocess.Popen[bytes], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A temporary directory for these tests, so that their servers can be found; its name is short enough for sockets.

    All tests share the application's server, which imports TensorFlow once.
    """
    tmp_path_factory.getbasetemp()  # create pytest's own directory before TMPDIR changes
    with tempfile.TemporaryDirectory(prefix="warm-", dir="/tmp") as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", directory)
        patch.setattr(tempfile, "tempdir", None)
        yield Path(directory)
        anchor.kill()
        anchor.wait()
        assert until(lambda: not servers(Path(directory))), "a server outlives its executor"


@pytest.fixture
def start(root: Path, anchor: subprocess.Popen[bytes], tmp_path: Path) -> Iterator[Start]:
    """Start a node of an application whose tasks run on one executor; ``warm`` says whether it may be forked."""
    nodes: list[Node] = []

    def run(main: Callable[..., Any], *, warm: bool = True, **options: Any) -> Node:
        terms: dict[str, Any] = {"warm_token": "the application's", "anchor": anchor.pid} if warm_process else {}
        nodes.append(Node(main, str(tmp_path), of_job=terms, **options))
        return nodes[-1]

    yield run
    for node in nodes:
        node.close()


def servers(root: Path) -> list[psutil.Process]:
    """Find the application's servers in a directory."""
    found = []
    for file in root.glob("tfos_nb-warm-*/alive"):
        try:
            process = psutil.Process(int(file.read_text()))
            alive = process.name() == "tfos_nb warm" and process.status() != psutil.STATUS_ZOMBIE
            found += [process] if alive else []
        except (OSError, ValueError, psutil.Error):
            continue
    return found


def describe(args: Any, ctx: Any) -> dict[str, Any]:
    """Describe all state of a process that one run could leave for the next."""
    import gc
    import os
    import random
    import resource
    import signal
    import sys
    import tempfile
    import threading

    import numpy as np
    import tensorflow as tf

    umask = os.umask(0)
    os.umask(umask)
    mine = {"TFOS_NB_PARENT", "TMPDIR", "TF_CONFIG"}  # each node has its own process, directory and port
    seen = {
        "environment": {name: value for name, value in os.environ.items() if name not in mine},
        "directory": os.getcwd(),
        "arguments": list(sys.argv),
        "path": list(dict.fromkeys(sys.path)),
        "umask": umask,
        "signals": {one.name: str(signal.getsignal(one)) for one in signal.valid_signals() if hasattr(one, "name")},
        "blocked": sorted(map(str, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "limits": [list(resource.getrlimit(kind)) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "standard input": os.readlink("/proc/self/fd/0"),
        "own session": os.getsid(0) == os.getpid(),
        "temporary": os.path.dirname(tempfile.gettempdir()),
        "collects": gc.isenabled(),
        "mine": sorted(name for name in sys.modules if name.startswith("of_the_user")),
        "precision": tf.keras.config.dtype_policy().name,
    }
    drawn = [random.random(), float(np.random.rand()), float(tf.random.normal(()))]
    return {"seen": seen, "drawn": drawn, "descriptors": len(os.listdir("/proc/self/fd"))}


def test_a_forked_node_starts_in_the_same_state_as_a_fresh_one(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = start(describe, warm=False).result()

    def leave_traces(args: Any, ctx: Any) -> None:
        import os
        import random
        import signal
        import sys
        import types

        import keras
        import numpy as np

        os.environ["LEFT"] = "this"
        os.chdir("/")
        os.umask(0o000)
        sys.path.insert(0, "/left")
        sys.modules["of_the_user"] = types.ModuleType("of_the_user")
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        keras.mixed_precision.set_global_policy("mixed_bfloat16")
        keras.utils.set_random_seed(1)
        random.seed(1)
        np.random.seed(1)

    start(leave_traces).result()
    first, second = start(describe).result(), start(describe).result()
    for forked in (first, second):
        for part, value in fresh["seen"].items():
            assert forked["seen"][part] == value, part
        assert forked["descriptors"] <= fresh["descriptors"] + 2
    for one, other in zip(first["drawn"], second["drawn"], strict=True):
        assert one != other, "two nodes draw the same numbers"
    monkeypatch.setenv("OF_A_LATER_RUN", "seen")
    assert start(describe).result()["seen"]["environment"]["OF_A_LATER_RUN"] == "seen"


def parent(args: Any, ctx: Any) -> list[Any]:
    import os
    from pathlib import Path

    server = int(Path(f"/proc/{os.getppid()}/stat").read_text().rsplit(") ", 1)[1].split()[1])
    return [os.getppid(), server, os.environ.get("TF_ONE", "")]


@pytest.mark.slow
def test_nodes_share_a_server_only_if_their_environment_variables_are_equal(start: Start, root: Path) -> None:
    nodes = [start(parent), start(parent)]
    (first, one, _), (second, other, _) = (node.result() for node in nodes)
    assert first != second
    assert one == other
    assert one in {server.pid for server in servers(root)}
    seen = set()
    for number in range(4):  # an import may depend on this variable
        _, server, value = start(parent, TF_ONE=str(number)).result()
        assert value == str(number)
        seen.add(server)
    assert len(seen) == 4
    assert until(lambda: len(servers(root)) <= 3), "as many processes with TensorFlow as there were environments"


def test_a_killed_server_is_restarted_and_its_nodes_survive(start: Start, root: Path) -> None:
    def wait(args: Any, ctx: Any) -> int:
        import threading

        threading.Event().wait()
        return 1

    node = start(wait)
    node.until(lambda: node.state.pid)
    process = psutil.Process(node.state.pid)
    server = psutil.Process(process.pid).parent().parent()
    server.kill()
    assert until(lambda: server not in servers(root))
    _, anew, _ = start(parent).result()
    assert anew != server.pid
    assert anew in {server.pid for server in servers(root)}
    assert process.is_running()
    assert process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_ends_with_its_supervisor_even_if_its_forker_is_stopped(start: Start, how: int) -> None:
    def wait(args: Any, ctx: Any) -> None:
        import threading

        threading.Event().wait()

    node = start(wait)
    node.until(lambda: node.state.pid)
    process, forker = psutil.Process(node.state.pid), psutil.Process(its_warm_process(node.state.pid))
    assert its_supervisor(process.pid) == node.supervisor.pid
    if how == signal.SIGSTOP:
        forker.suspend()
        node.close()
    else:
        node.supervisor.kill()
    for one in (process, forker):
        assert until(lambda one=one: not one.is_running() or one.status() == psutil.STATUS_ZOMBIE), one


def test_a_directory_that_others_can_enter_is_not_used_and_the_log_says_so(start: Start, root: Path) -> None:
    _, server, _ = start(parent).result()
    (there,) = (file.parent for file in root.glob("tfos_nb-warm-*/alive") if file.read_text() == str(server))
    there.chmod(0o755)
    node = start(parent)
    assert node.result()[1] != server
    there.chmod(0o700)
    assert any("is not a directory that only this user can enter" in line for line in node.controller.logs("worker:0"))


@pytest.fixture
def full_disk(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory on a disk without free space."""
    with tempfile.TemporaryDirectory(dir=root) as there:
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", there], check=False).returncode:
            pytest.skip("only root can mount a small disk")
        try:
            with pytest.raises(OSError, match="No space"), open(os.path.join(there, "all"), "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            monkeypatch.setattr(tempfile, "tempdir", there)  # the directory was chosen before the disk was full
            yield Path(there)
        finally:
            subprocess.run(["umount", "--lazy", there], check=True)


def terms_of(anchor: subprocess.Popen[bytes]) -> ServerTerms:
    return ServerTerms("the application's", anchor.pid, 600.0)


def test_a_server_starts_even_if_the_disk_is_full(full_disk: Path, anchor: subprocess.Popen[bytes]) -> None:
    env, terms = dict(os.environ), replace(terms_of(anchor), token="of a full disk")
    WarmProcess.of_the_application(env, terms).close()
    assert until(lambda: warm_process.state_on_this_host(env, terms.token) == "warm")
    assert [path.name for path in full_disk.glob("tfos_nb-warm-*/alive")] == ["alive"]


def test_a_stranger_gets_no_process(root: Path, anchor: subprocess.Popen[bytes]) -> None:
    strange = replace(terms_of(anchor), token="an application's that strangers look for")
    before = set(root.glob("tfos_nb-warm-*"))
    warm_process = WarmProcess.of_the_application(dict(os.environ), strange)
    (there,) = set(root.glob("tfos_nb-warm-*")) - before
    path = there / "socket"
    given = Environment("guessed", {}, "/", (), 0o22, os.getpid())
    for said in (wire.encode(given), b"nonsense", wire.encode(Fork("tfos_nb.runtime.node.tensorflow_process"))):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(str(path))
            stranger.send(said)
            stranger.settimeout(60)
            assert stranger.recv(100) == b""
    assert path.stat().st_mode & 0o777 == 0o600
    warm_process.close()


def test_a_server_without_nodes_ends_after_a_while(root: Path, anchor: subprocess.Popen[bytes]) -> None:
    before = set(root.glob("tfos_nb-warm-*"))
    brief = ServerTerms("an application's that has ended", anchor.pid, 0.5)
    warm_process = WarmProcess.of_the_application(dict(os.environ), brief)
    (there,) = set(root.glob("tfos_nb-warm-*")) - before
    warm_process.close()
    assert until(lambda: not there.exists(), 60)


def test_a_server_stays_until_the_last_executor_that_used_it_has_ended(root: Path) -> None:
    executors = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10_000)"]) for _ in range(3)]
    env, token = dict(os.environ), "an application's with three executors"
    found = {server_of(env, ServerTerms(token, one.pid, 600.0)) for one in executors[:2]}
    assert len(found) == 1
    assert until(lambda: warm_process.state_on_this_host(env, token) == "warm", 60)
    (server,) = found
    executors[0].kill()
    executors[0].wait()
    assert server_of(env, ServerTerms(token, executors[2].pid, 600.0)) == server
    executors[1].kill()
    executors[1].wait()
    assert not until(lambda: warm_process.state_on_this_host(env, token) == "cold", 7)
    executors[2].kill()
    executors[2].wait()
    assert until(lambda: warm_process.state_on_this_host(env, token) == "cold", 30)


def server_of(env: dict[str, str], terms: ServerTerms) -> int:
    """Connect to a server and return its process id."""
    WarmProcess.of_the_application(env, terms).close()
    return int(Path(warm_process._directory(env, terms.token), "alive").read_text())


def test_a_server_is_replaced_if_a_module_that_it_imported_has_changed(
    root: Path, anchor: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """As after ``pip install --upgrade`` between two cells. Python imports ``sitecustomize`` when it starts."""
    module = tmp_path / "sitecustomize.py"
    module.write_text("VERSION = 1")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    terms = replace(terms_of(anchor), token="of changed files")
    first = server_of(env, terms)
    assert until(lambda: warm_process.state_on_this_host(env, terms.token) == "warm")
    assert server_of(env, terms) == first
    module.write_text("VERSION = 2")
    os.utime(module, ns=(1, 1))
    assert server_of(env, terms) != first
    assert first not in {server.pid for server in servers(root)}


@pytest.mark.slow
def test_the_number_of_servers_is_limited_when_many_environments_start_at_once(
    root: Path, anchor: subprocess.Popen[bytes]
) -> None:
    terms = replace(terms_of(anchor), token="of many at once")
    environments = [{**os.environ, "TF_ONE": f"at once {number}"} for number in range(6)]
    starting = [threading.Thread(target=server_of, args=(env, terms)) for env in environments]
    for thread in starting:
        thread.start()
    for thread in starting:
        thread.join(60)

    def served() -> int:
        return sum(warm_process.state_on_this_host(env, terms.token) != "cold" for env in environments)

    assert until(lambda: served() <= 3, 120)


def test_a_user_without_a_home_directory_can_have_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert len(warm_process._fingerprint({"TF_ONE": "1"})) == 8


def test_only_variables_that_an_import_may_read_require_another_server() -> None:
    plain = warm_process._fingerprint({})
    for name in ("PYTHONHASHSEED", "PYTHON_GIL", "TF_ONE"):
        assert warm_process._fingerprint({name: "1"}) != plain
    for name in ("PYTHONPATH", "PYTHON_FAULTHANDLER_DIR", "PYTHON_UNIX_DOMAIN_ENABLED", "PYTHON_WORKER_FACTORY_PORT"):
        assert warm_process._fingerprint({name: "1"}) == plain


def test_the_directory_of_a_killed_server_is_removed_by_the_next(root: Path, anchor: subprocess.Popen[bytes]) -> None:
    before = set(root.glob("tfos_nb-warm-*"))
    WarmProcess.of_the_application(dict(os.environ), replace(terms_of(anchor), token="a killed one's")).close()
    (old,) = set(root.glob("tfos_nb-warm-*")) - before
    assert until(lambda: [server for server in servers(root) if str(server.pid) == (old / "alive").read_text()])
    server = psutil.Process(int((old / "alive").read_text()))
    server.kill()
    assert until(lambda: server not in servers(root))
    os.utime(old, (0, 0))
    WarmProcess.of_the_application(dict(os.environ), replace(terms_of(anchor), token="the next one's")).close()
    assert not old.exists()


def test_a_fork_leads_its_process_group_before_it_is_announced(run_script: RunScript) -> None:
    said = run_script("""
        import os, socket, time
        from tfos_nb.runtime.control import wire
        from tfos_nb.runtime.node import tensorflow_process, warm_process

        lead, tensorflow_process.main = os.setsid, lambda: time.sleep(1000)
        os.setsid = lambda: (time.sleep(0.5), lead())  # as a machine may do that has other work
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            ours.close()
            warm_process._Forker(theirs).run()
            os._exit(0)
        theirs.close()
        order = warm_process.Fork(warm_process.PROGRAMS[0])
        socket.send_fds(ours, [wire.encode(order)], [0, 1, os.open(os.devnull, os.O_WRONLY)])
        forked = wire.decode(ours.recv(65536))
        print(os.getpgid(forked.pid) == forked.pid)
        """).stdout
    assert said.strip() == "True"


def test_a_new_server_can_use_the_directory_of_one_killed_long_ago(root: Path, anchor: Any) -> None:
    terms = replace(terms_of(anchor), token="its successor's")
    env = dict(os.environ)
    WarmProcess.of_the_application(env, terms).close()
    directory = Path(warm_process._directory(env, terms.token))
    assert until(lambda: (directory / "alive").read_text() != "")
    os.kill(int((directory / "alive").read_text()), signal.SIGKILL)
    assert until(lambda: not warm_process._is_served(directory))
    os.utime(directory, (0, 0))
    assert warm_process.state_on_this_host(env, terms.token) == "cold"
    WarmProcess.of_the_application(env, terms).close()
    assert until(lambda: warm_process.state_on_this_host(env, terms.token) == "warm")
    os.kill(int((directory / "alive").read_text()), signal.SIGTERM)


def test_applying_a_model_does_not_change_which_server_a_spark_worker_uses(run_script: RunScript) -> None:
    said = run_script("""
        from tfos_nb.runtime.models import model_cache
        from tfos_nb.runtime.node import process, warm_process

        def directory():
            return warm_process._directory(process.environment_of("/tmp", {}), "the application's")

        before = directory()
        model_cache._set_up(model_cache.TaskResources())
        import keras
        print(before == directory())
        """).stdout
    assert said.strip() == "True"


def test_waiting_for_a_lock_whose_holder_was_stopped_times_out(
    root: Path, anchor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_process, "_LOCKED_WITHIN", 0.5)
    terms = replace(terms_of(anchor), token="the holder's")
    directory = warm_process._directory(dict(os.environ), terms.token)
    warm_process._make_private(directory)
    with open(os.path.join(directory, "lock"), "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=r"has held .* for 0.5 s"):
            WarmProcess.of_the_application(dict(os.environ), terms)
