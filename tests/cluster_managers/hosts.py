"""Hosts for a test: network namespaces of this machine, each with its own address, connected by a bridge."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import psutil

_NOBODY = "02:00:00:00:00:01"
_CABLE = "cable"


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

    @contextmanager
    def slow(self, rate: str) -> Iterator[None]:
        """Limit the rate in both directions, for example to ``20mbit``."""
        with ExitStack() as undone:
            _limit(undone, rate, ("dev", self.link))
            _limit(undone, rate, ("dev", "eth0"), self)
            yield


@contextmanager
def cut_link(one: Host, other: Host) -> Iterator[None]:
    """Lose all packets between two hosts without an error; both still reach all others.

    Each host sends the other's packets to a hardware address that no host has.
    """
    with ExitStack() as undone:
        for here, there in ((one, other), (other, one)):
            entry = (there.address, "dev", "eth0")
            undone.callback(_ip, "-n", here.name, "neigh", "del", *entry)
            _ip("-n", here.name, "neigh", "replace", *entry, "lladdr", _NOBODY, "nud", "permanent")
        yield


@contextmanager
def slow_link(one: Host, other: Host, rate: str) -> Iterator[None]:
    """Limit the rate between two hosts only: they get a cable of their own beside the bridge.

    A filter by address would need classifiers, which many kernels do not have. New connections use the cable.
    """
    with ExitStack() as undone:
        _ip("-n", one.name, "link", "add", _CABLE, "type", "veth", "peer", "name", _CABLE, "netns", other.name)
        undone.callback(_ip, "-n", one.name, "link", "del", _CABLE)  # with its other end, and the routes
        for here, there in ((one, other), (other, one)):
            _ip("-n", here.name, "link", "set", _CABLE, "up")
            _ip("-n", here.name, "route", "add", f"{there.address}/32", "dev", _CABLE, "src", here.address)
            _run(*here.command("tc", "qdisc", "add", "dev", _CABLE, *_rate(rate)))
        yield


def bytes_on(host: Host) -> int:
    """Return how many bytes a host has sent on the cable of :func:`slow_link`."""
    told = _run("ip", "-n", host.name, "-s", "-j", "link", "show", _CABLE)
    return int(json.loads(told)[0]["stats64"]["tx"]["bytes"])


def why_not_slow() -> str:
    """Return why this machine cannot limit a rate; empty if it can."""
    if shutil.which("tc") is None:
        return "a slow link needs the command tc (iproute2)"
    device = f"tfosq{os.getpid() % 100_000}"  # hosts of this process may exist, and have their names
    try:
        with ExitStack() as undone:
            _ip("link", "add", device, "type", "veth")
            undone.callback(_ip, "link", "del", device)
            _limit(undone, "20mbit", ("dev", device))
            return ""
    except subprocess.CalledProcessError as error:
        return f"this kernel cannot limit a rate: {error.stderr.strip()}"


def _rate(rate: str) -> tuple[str, ...]:
    return ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "50ms")


def _limit(undone: ExitStack, rate: str, device: tuple[str, str], host: Host | None = None) -> None:
    within = host.command if host is not None else lambda *words: words
    _run(*within("tc", "qdisc", "add", *device, *_rate(rate)))
    undone.callback(_run, *within("tc", "qdisc", "del", *device, "root"))


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
