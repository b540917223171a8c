"""Hosts for a test: network namespaces of this machine, each with its own address, connected by a bridge."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Host:
    """A network namespace: processes started by :meth:`command` have its address and only its network."""

    name: str
    address: str
    link: str
    """The bridge's end of its cable."""
    disk: str = ""
    """A directory that is this host's own: each of the commands sees an empty one there."""

    def command(self, *words: str) -> tuple[str, ...]:
        """Return the command that runs another command on this host."""
        own = ("sh", "-c", f'mount -t tmpfs own "{self.disk}" && exec "$@"', "sh") if self.disk else ()
        return ("ip", "netns", "exec", self.name, *own, *words)

    def of_tfos_nb(self) -> dict[int, str]:
        """Return the processes of tfos_nb on this host: their pids, with the modules that they run."""
        found = {}
        for number in map(int, _run("ip", "netns", "pids", self.name).split()):
            with contextlib.suppress(psutil.Error):  # it has ended
                process = psutil.Process(number)
                words = process.cmdline() if process.status() != psutil.STATUS_ZOMBIE else []
                if words[1:2] == ["-m"] and words[2].startswith("tfos_nb."):
                    found[number] = words[2]
        return found

    def cut_off(self) -> None:
        """Disconnect the host: packets are lost without an error."""
        _ip("link", "set", self.link, "down")

    def connect(self) -> None:
        """Connect the host again."""
        _ip("link", "set", self.link, "up")

    def slow_down(self, rate: str) -> None:
        """Limit the rate in both directions, for example to ``20mbit``."""
        limit = ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "50ms")
        _run("tc", "qdisc", "add", "dev", self.link, *limit)
        _run(*self.command("tc", "qdisc", "add", "dev", "eth0", *limit))


@dataclass(frozen=True)
class Network:
    """The hosts, and the address of this machine in their network."""

    address: str
    hosts: tuple[Host, ...]


def why_not() -> str:
    """Return why this machine cannot make such hosts; empty if it can."""
    if shutil.which("ip") is None:
        return "network namespaces need the command ip (iproute2)"
    tried = _names(1)
    try:
        with _network(tried):
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"


@contextmanager
def network(count: int, disk: str = "") -> Iterator[Network]:
    """Make ``count`` hosts; remove them afterwards. ``disk`` is a directory of which each host has its own."""
    with _network(_names(count), disk) as made:
        yield made


def _names(count: int) -> tuple[str, ...]:
    return tuple(f"tfos{os.getpid() % 100_000}-{number}" for number in range(count))


@contextmanager
def _network(names: tuple[str, ...], disk: str = "") -> Iterator[Network]:
    bridge, subnet = f"tfosb{os.getpid() % 100_000}", f"10.77.{os.getpid() % 250}"
    _remove_left()
    with ExitStack() as made:
        _ip("link", "add", bridge, "type", "bridge")
        made.callback(_ip, "link", "del", bridge)
        _ip("addr", "add", f"{subnet}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        hosts = [_host(made, name, bridge, f"{subnet}.{number + 2}", disk) for number, name in enumerate(names)]
        yield Network(f"{subnet}.1", tuple(hosts))


def _host(made: ExitStack, name: str, bridge: str, address: str, disk: str) -> Host:
    _ip("netns", "add", name)
    made.callback(_ip, "netns", "del", name)
    link = f"v{name[4:]}"
    _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
    _ip("link", "set", link, "master", bridge, "up")
    _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
    for device in ("eth0", "lo"):
        _ip("-n", name, "link", "set", device, "up")
    return Host(name, address, link, disk)


def _remove_left() -> None:
    """Remove what tests that were killed have left: their process is in the name."""
    for kind, form, words in (("link", r"tfosb(\d+)(?=:)", "link del"), ("netns", r"tfos(\d+)-\d+", "netns del")):
        for found in re.finditer(rf"\b{form}", _run("ip", kind, "show")):
            if not psutil.pid_exists(int(found[1])):
                with contextlib.suppress(subprocess.CalledProcessError):  # another test has done it
                    _ip(*words.split(), found[0])


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=30).stdout
