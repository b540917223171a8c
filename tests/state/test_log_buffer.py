"""Lines of many nodes in bounded memory, in the order of arrival."""

from __future__ import annotations

import pytest

from tfos_nb.state import active_clusters, log_buffer
from tfos_nb.state.cluster_state import LogLine
from tfos_nb.state.log_buffer import LogBook


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(log_buffer.time, "time", lambda: now[0])
    return now


def test_a_line_has_its_time_of_arrival(clock: list[float]) -> None:
    book = LogBook(["worker:0"])
    book.add("worker:0", ("one",))
    clock[0] = 1001.5
    book.add("worker:0", ("two",))
    assert book.lines("worker:0") == [LogLine(1000.0, "worker:0", "one"), LogLine(1001.5, "worker:0", "two")]
    assert book.texts("worker:0") == ["one", "two"]


def test_reading_on_after_a_line_misses_none(clock: list[float]) -> None:
    book = LogBook(["worker:0", "worker:1"])
    read: list[str] = []
    after = 0.0
    for number in range(10):
        clock[0] -= number  # even if the clock is set back in between
        book.add("worker:0", [f"{number}.{line}" for line in range(5)])
        book.add("worker:1", ("another's",))
        while new := book.lines("worker:0", after=after, limit=2):
            read += [line.text for line in new]
            after = new[-1].time
    assert read == book.texts("worker:0")
    assert len(read) == 50


def test_the_newest_lines_of_one_or_all_nodes_are_in_order(clock: list[float]) -> None:
    book = LogBook(["a", "b"])
    for number in range(1500):
        book.add("ab"[number % 2], [str(number)])
    assert [line.text for line in book.lines("a", limit=2)] == ["1496", "1498"]
    for count in (0, 1, 3, 1000, 1400, 5000):
        tail = book.tail(count)
        assert [line.text for line in tail] == [str(number) for number in range(max(0, 1500 - count), 1500)]
        assert all(line.node == "ab"[int(line.text) % 2] for line in tail)


def test_a_node_that_writes_endlessly_takes_bounded_memory() -> None:
    book = LogBook(["a", "b"])
    book.add("b", ("still here",))
    for _ in range(100):
        book.add("a", ["x" * 4000] * 100)
    assert sum(map(len, book.texts("a"))) <= 1 << 21
    for _ in range(30):
        book.add("a", [""] * 1000)
    assert len(book.texts("a")) == 10_000
    assert book.texts("b") == ["still here"]


class Ended:
    """The lines of an ended cluster."""

    def __init__(self, name: str, nodes: int = 8, lines: int = 10_000, size: int = 94) -> None:
        self.id, self.book = name, LogBook([f"worker:{number}" for number in range(nodes)])
        for node in self.book._lines:
            self.book.add(node, ["x" * size] * lines)
        self.shorten_logs = self.book.shorten

    @property
    def log_bytes(self) -> int:
        return self.book.size


def test_ended_clusters_together_keep_a_bounded_number_of_bytes() -> None:
    ended = [Ended(f"cluster-{number}") for number in range(4)]
    for cluster in ended:
        active_clusters.end(cluster)
    sizes = [cluster.log_bytes for cluster in ended]
    assert sizes[-1] > 16 << 20
    assert sum(sizes) <= 32 << 20
    assert len(ended[-1].book.texts("worker:7")) == 10_000
    assert ended[0].book.texts("worker:7") == ["x" * 94] * 50
    assert len(ended[0].book.tail(100)) == 50


def test_a_large_cluster_keeps_what_fits_and_earlier_clusters_their_lines() -> None:
    small = [Ended(f"small-{number}", nodes=2, lines=300) for number in range(3)]
    large = Ended("large", nodes=10, lines=10_000, size=4000)
    for cluster in (*small, large):
        active_clusters.end(cluster)
    assert 8 << 20 < large.log_bytes <= 32 << 20
    assert min(len(large.book.texts(f"worker:{number}")) for number in range(10)) > 300
    newest = Ended("newest", nodes=2, lines=300)
    active_clusters.end(newest)
    assert len(newest.book.texts("worker:0")) == 300
    assert sum(cluster.log_bytes for cluster in (*small, large, newest)) <= 32 << 20


def test_an_unknown_node_is_an_error() -> None:
    book = LogBook(["a"])
    for asked in (lambda: book.texts("b"), lambda: book.lines("b"), lambda: book.add("b", ("x",))):
        with pytest.raises(KeyError):
            asked()
