"""Check which other nodes a node's host reaches: both ends, and the messages.

::

    driver ──AskLinks──▶ supervisor ──connects to TensorFlow's ports──▶ the other nodes' hosts
    driver ◀──LinksSeen── supervisor

The driver's connections do not say whether the nodes reach each other: a firewall, or a switch, may lose the packets
between two hosts only. TensorFlow waits for such a peer for as long as TCP repeats a packet, about 15 minutes.

A host that refuses the connection is reached, since it has answered: TensorFlow may not listen at that moment. A host
is not reached if it does not answer at all, or if a router says so.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from tfos_nb.runtime.control.processes import answers
from tfos_nb.runtime.control.wire import message

__all__ = ["PROBE_SECONDS", "AskLinks", "LinksSeen", "Pair", "see_links"]

Pair = tuple[str, str]
"""Names of two nodes, in the order of the plan."""

PROBE_SECONDS = 3.5
"""Seconds within which a host must answer: Linux sends the first packet again after one and after three seconds."""
_AT_ONCE = 256  # connections
_NOT_REACHED = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}


@message
@dataclass(frozen=True)
class AskLinks:
    """To a supervisor: which of these nodes does your host not reach? The answer has the same number."""

    number: int
    places: dict[str, tuple[str, int]]


@message
@dataclass(frozen=True)
class LinksSeen:
    """From a supervisor: the nodes that its host does not reach; ``serves``: its own TensorFlow listens.

    A program whose nodes do not train together makes no server, and needs no link.
    """

    node: str
    number: int
    unreached: tuple[str, ...] = ()
    serves: bool = False


def see_links(node: str, asked: AskLinks, seconds: float = PROBE_SECONDS) -> LinksSeen:
    """Connect to one port of each host; takes ``seconds`` if one does not answer, else only as long as the answers."""
    by_host: dict[str, list[str]] = {}
    for name, (host, _) in asked.places.items():
        by_host.setdefault(host, []).append(name)
    silent = _silent_hosts({host: asked.places[names[0]][1] for host, names in by_host.items()}, seconds)
    serves = node in asked.places and answers("localhost", asked.places[node][1])
    return LinksSeen(node, asked.number, tuple(name for host in silent for name in by_host[host]), serves)


def _silent_hosts(ports: Mapping[str, int], seconds: float) -> list[str]:
    """Return the hosts that do not answer; many are asked in groups, which bounds the number of descriptors."""
    waiting, silent = iter(ports.items()), list[str]()
    while group := list(islice(waiting, _AT_ONCE)):
        silent += _silent_of(group, seconds)
    return silent


def _silent_of(places: Iterable[tuple[str, int]], seconds: float) -> list[str]:
    deadline, silent = time.monotonic() + seconds, list[str]()
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as selector:
        for host, port in places:
            with contextlib.suppress(OSError):  # no descriptor is left here, which says nothing about the other host
                connection = opened.enter_context(socket.socket(_family_of(host), socket.SOCK_STREAM))
                connection.setblocking(False)
                number = connection.connect_ex((host, port))
                if number == errno.EINPROGRESS:
                    selector.register(connection, selectors.EVENT_WRITE, host)
                elif number in _NOT_REACHED:
                    silent.append(host)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                selector.unregister(key.fileobj)
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _NOT_REACHED:
                    silent.append(key.data)
        return silent + [key.data for key in selector.get_map().values()]


def _family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
