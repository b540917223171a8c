"""Measure TensorFlowOnSpark 2.2.5's reservation server with many clients. Runs in its own environment; prints JSON.

The clients are its own as well, one thread each, in two processes. They register, ask once a second whether all have
registered, and then fetch the list. At first all but one register, and the server's share of a core is measured while
they ask. Then the last one registers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from typing import Any

PROCESSES = 2
ASKING_SECONDS = 8.0
PATIENCE = 60.0


def main(nodes: int) -> dict[str, Any]:
    """Measure a server for this number of nodes."""
    from tensorflowonspark import reservation

    died: list[str] = []
    threading.excepthook = lambda what: died.append(f"{what.exc_type.__name__}: {what.exc_value}")
    server = reservation.Server(nodes)
    _, port = server.start()
    began = time.time()
    crews = [_start(place, nodes, "127.0.0.1", port) for place in range(PROCESSES)]
    try:
        came = _wait(lambda: server.reservations.remaining() <= 1 or died, PATIENCE)
        found: dict[str, Any] = {"nodes": nodes, "registered": nodes - server.reservations.remaining()}
        if not came or died:
            return {**found, "ended": died[0] if died else f"not complete after {PATIENCE:g} s"}
        found["registering"] = time.time() - began
        used, since = time.process_time(), time.monotonic()
        _wait(lambda: died, ASKING_SECONDS)
        found["cpu"] = (time.process_time() - used) / (time.monotonic() - since)
        if died:
            return {**found, "ended": died[0]}
        last = time.time()
        _tell(crews[-1])
        ends = [_ended_at(crew, died) for crew in crews]
        if None in ends or died:
            return {**found, "ended": died[0] if died else f"not all told after {PATIENCE:g} s"}
        return {**found, "telling_all": max(end for end in ends if end is not None) - last, "ended": ""}
    finally:
        for crew in crews:
            crew.kill()
            crew.wait()


def _start(place: int, nodes: int, host: str, port: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.lineage_fleet", "clients", host, str(port), str(place), str(nodes)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _tell(crew: subprocess.Popen[str]) -> None:
    assert crew.stdin is not None, "it was asked for"
    crew.stdin.write("\n")
    crew.stdin.flush()


def _ended_at(crew: subprocess.Popen[str], died: list[str]) -> float | None:
    """Return the time at which the last client had the list; None after a timeout, or if the server has died."""
    told: list[str] = []
    reader = threading.Thread(target=lambda: told.append(crew.stdout.readline() if crew.stdout else ""), daemon=True)
    reader.start()
    _wait(lambda: told or died, PATIENCE)
    return json.loads(told[0])["at"] if told and told[0] else None


def _wait(reached: Any, seconds: float) -> bool:
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not reached() and time.monotonic() < deadline:
        pause.wait(0.02)
    return bool(reached())


def clients(host: str, port: int, place: int, nodes: int) -> None:
    """Run this process's share of the clients; the last one of all waits for a line on standard input."""
    mine = range(place, nodes, PROCESSES)
    threading.stack_size(256 * 1024)
    threads = [threading.Thread(target=_client, args=((host, port), number)) for number in mine if number < nodes - 1]
    for thread in threads:
        thread.start()
    if nodes - 1 in mine:
        sys.stdin.readline()
        _client((host, port), nodes - 1)
    for thread in threads:
        thread.join()
    sys.stdout.write(json.dumps({"at": time.time()}) + "\n")
    sys.stdout.flush()


def _client(address: tuple[str, int], number: int) -> None:
    from tensorflowonspark import reservation

    client = reservation.Client(address)
    meta = {
        "executor_id": number,
        "host": f"10.0.{number >> 8}.{number & 255}",
        "job_name": "worker",
        "task_index": number,
        "port": 35000 + number % 20000,
        "tb_pid": 0,
        "tb_port": 0,
        "addr": f"/tmp/pymp-{number:08d}/listener-{number:08d}",
        "authkey": b"0123456789abcdef",
    }
    client.register(meta)
    client.await_reservations()
    client.close()


if __name__ == "__main__":
    if sys.argv[1] == "clients":
        clients(sys.argv[2], *(int(text) for text in sys.argv[3:6]))
    else:
        sys.stdout.write(json.dumps(main(int(sys.argv[1]))) + "\n")
