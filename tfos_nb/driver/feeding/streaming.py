"""Feeding from a stream: a Structured Streaming DataFrame, or a DStream of an older program.

::

    query (foreachBatch) ─▶ micro-batch k ─▶ nodes: ctx.batches() gives k, main trains, saves (state, k), asks for more
          ▲                                                                                                   │
          └── Spark notes k as done ◀── the call returns ◀── every node has asked for the batch after k ◀─────┘

So ``main`` saves its state of a batch before Spark's checkpoint notes that batch. After a restart from both, Spark
delivers the batch that it had not noted once more. ``ctx.batches(after=k)`` skips it if the state includes it already.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tfos_nb.driver.feed_controller import FeedOf, check_feedable
from tfos_nb.driver.feeding.training import Training
from tfos_nb.driver.launching import error_of_job
from tfos_nb.errors import FeedFailed, PlanError
from tfos_nb.spark.contexts import is_connect
from tfos_nb.spark.feedable import check_alike, feedable

__all__ = ["StreamTraining", "is_stream", "refuse_stream"]

_LOOK_EVERY = 1.0  # seconds; Spark has no event that Python could wait for beside the cluster's own


def is_stream(data: Any) -> bool:
    """Whether ``data`` is a stream, without an end: a streaming DataFrame, its ``writeStream``, or a DStream."""
    kind = type(data)
    return getattr(data, "isStreaming", False) is True or hasattr(kind, "foreachBatch") or hasattr(kind, "foreachRDD")


def refuse_stream(data: Any, what: str) -> None:
    """Refuse a stream where the rows must have an end.

    Raises
    ------
    PlanError
        If it is a stream; ``what`` names its use.
    """
    if is_stream(data):
        raise PlanError(
            f"{what} is a stream, which has no end: give a DataFrame that was read with spark.read, "
            "or write the stream to a table and read that"
        )


@dataclass
class StreamTraining:
    """One call of ``train`` with a stream."""

    training: Training
    _place: FeedOf = field(default_factory=FeedOf)
    _error: BaseException | None = None
    _over: threading.Event = field(default_factory=threading.Event)

    def run(self, stream: Any, epochs: int, validation: Any, interrupted: Callable[[], object]) -> None:
        """Feed one micro-batch after the other, until the stream ends, is stopped, or the nodes have enough.

        An interrupt calls ``interrupted`` at once, and then waits for the current batch.

        Raises
        ------
        PlanError
            For several epochs, or a column that cannot become a tensor, before anything is read.
        FeedFailed
            If the stream fails.
        """
        if epochs != 1:
            raise PlanError(
                f"epochs must be 1 for a stream, got {epochs}: its rows come once and are not kept. Leave epochs out; "
                "to repeat a micro-batch, main must keep its rows"
            )
        source = _source_of(stream)
        if validation is not None:
            check_feedable(validation)
            check_alike(source.frame, validation)
        self._place = self.training.begin_call(validation)
        try:
            source.start(self)
            self._wait(source)
        except BaseException as error:
            if not isinstance(error, Exception):
                interrupted()  # before waiting for the current batch, on which main may compute for long
            raise
        finally:
            self._over.set()
            source.stop()  # waits for the current batch
        self._tell_outcome(source)

    def _wait(self, source: _Structured | _DStream) -> None:
        changed = self.training.controller.changed
        while source.active and not self.is_over:
            with changed:
                if not self.is_over:
                    changed.wait(_LOOK_EVERY)

    @property
    def is_over(self) -> bool:
        """Whether no more batches are wanted."""
        if self._over.is_set() or self._error is not None or self.training.ending:
            return True
        return self.training.nobody_wants(self._place.call)

    def take(self, data: Any, number: int, consecutive: bool) -> None:
        """Deliver a micro-batch, in Spark's thread; raise if Spark must not record it as done."""
        if self.is_over:
            raise FeedFailed(
                f"batch {number} was not fed, because train() of this stream has ended: call train() again"
            )
        try:
            whole = self.training.feed_batch(data, replace(self._place, batch=number, consecutive=consecutive))
        except BaseException as error:
            self._error = error
            raise
        finally:
            self.training.outcome.wake()
        if not whole:
            raise FeedFailed(
                f"the nodes stopped taking rows within batch {number}, so Spark must not record it as done: call "
                "train() again to feed it"
            )

    def _tell_outcome(self, source: _Structured | _DStream) -> None:
        self.training.raise_if_ended()
        if self._error is not None:
            raise self._error
        if source.error is not None and not self.training.nobody_wants(self._place.call):
            raise error_of_job(source.error, "the stream ended by an error")


def _source_of(stream: Any) -> _Structured | _DStream:
    if hasattr(type(stream), "foreachRDD"):
        return _DStream(stream)
    if is_connect(stream):
        raise PlanError(
            "a stream of Spark Connect cannot be fed: the server would run the code that feeds a micro-batch, away "
            "from the cluster. Use a classic SparkSession, or write the stream to a table and train on that"
        )
    writer = stream if hasattr(type(stream), "foreachBatch") else stream.writeStream
    feedable(writer._df)
    return _Structured(writer)


class _Structured:
    """Query of Structured Streaming.

    Parameters
    ----------
    writer : pyspark.sql.streaming.DataStreamWriter
        With the user's trigger and checkpoint location.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self.frame = writer._df
        self._query: Any = None
        self._taker: StreamTraining | None = None

    def start(self, taker: StreamTraining) -> None:
        """Start the query; its batches go to ``taker``."""
        self._taker = taker
        self._query = self._writer.foreachBatch(self._take).start()

    def _take(self, frame: Any, number: int) -> None:
        assert self._taker is not None
        self._taker.take(frame, int(number), consecutive=True)

    @property
    def active(self) -> bool:
        """Whether more batches may come."""
        return bool(self._query.isActive)

    @property
    def error(self) -> BaseException | None:
        """The error that ended it, if any."""
        found: BaseException | None = self._query.exception() if self._query is not None else None
        return found

    def stop(self) -> None:
        """End it after the current batch."""
        if self._query is not None:
            self._query.stop()


class _DStream:
    """DStream, which is started and stopped with its StreamingContext.

    Parameters
    ----------
    stream : pyspark.streaming.DStream
        Before its context has been started.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = self.frame = stream
        self._context = stream._ssc
        self._taker: StreamTraining | None = None
        self.error: BaseException | None = None
        if self._state() != "INITIALIZED":
            raise PlanError(
                "the StreamingContext of this DStream has been started: train registers with it and starts it, so call "
                "cluster.train(dstream) instead of ssc.start()"
            )

    def _state(self) -> str:
        return str(self._context._jssc.getState().toString())

    def start(self, taker: StreamTraining) -> None:
        """Start the context; the stream's RDDs go to ``taker``."""
        self._taker = taker
        self._stream.foreachRDD(self._take)
        self._context.start()

    def _take(self, time: Any, rdd: Any) -> None:
        assert self._taker is not None
        if self._taker.is_over:
            return  # a graceful stop still delivers the waiting RDDs
        self._taker.take(rdd, int(time.timestamp() * 1000), consecutive=False)

    @property
    def active(self) -> bool:
        """Whether more RDDs may come."""
        if self.error is None and self._state() == "ACTIVE":
            try:
                return not self._context.awaitTerminationOrTimeout(0)
            except Exception as error:  # noqa: BLE001 - train raises any error
                self.error = error
        return False

    def stop(self) -> None:
        """End it after the RDDs that have come."""
        if self._state() == "ACTIVE":
            self._context.stop(stopSparkContext=False, stopGraceFully=self.error is None)
