"""The Params that say how an Estimator fits: which rows are for validation, what Spark gives, how rows are fed."""

from __future__ import annotations

from typing import Any, TypeVar

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasSeed, HasValidationIndicatorCol, HasWeightCol

from tfos_nb.pipeline.conversion import to_count, to_number

__all__ = ["HasFeed", "HasProgress", "HasRecovery", "HasResources", "HasRowRoles"]

P = TypeVar("P", bound=Params)

PROGRESS = ("auto", "widget", "html", "text", "none")


def _to_seconds(value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return float(value)
    raise TypeError(f"{value!r} is no number of seconds above 0")


def _to_progress(value: Any) -> str:
    if value in PROGRESS:
        return str(value)
    raise TypeError(f"{value!r} is none of {', '.join(PROGRESS)}")


class HasRowRoles(HasWeightCol, HasValidationIndicatorCol, HasSeed):
    """Which rows weigh how much, which are for validation; and the seed. Spark ML's own Params."""

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(weightCol=None, validationIndicatorCol=None, seed=None)

    def setWeightCol(self: P, value: str | None) -> P:
        """Set the column of the rows' weights."""
        return self._set(weightCol=value)

    def setValidationIndicatorCol(self: P, value: str | None) -> P:
        """Set the boolean column that is true for validation rows."""
        return self._set(validationIndicatorCol=value)

    def setSeed(self: P, value: int | None) -> P:
        """Set what Python, NumPy and TensorFlow are seeded with on the nodes."""
        return self._set(seed=value)


class HasResources(Params):
    """What Spark gives the nodes, and how long a fit waits for it."""

    gpus: Param[int] = Param(Params._dummy(), "gpus", "GPUs of each node that trains", to_number)
    cpus: Param[int] = Param(Params._dummy(), "cpus", "Spark's CPUs of each node", to_count)
    slot_timeout: Param[float] = Param(
        Params._dummy(), "slot_timeout", "seconds that a fit waits for slots that something else holds", _to_seconds
    )
    rendezvous_timeout: Param[float] = Param(
        Params._dummy(), "rendezvous_timeout", "seconds within which all nodes must have come", _to_seconds
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(gpus=0, cpus=1, slot_timeout=600.0, rendezvous_timeout=120.0)

    def setGpus(self: P, value: int) -> P:
        """Set it."""
        return self._set(gpus=value)

    def getGpus(self) -> int:
        """Return it."""
        return self.getOrDefault(self.gpus)

    def setCpus(self: P, value: int) -> P:
        """Set it."""
        return self._set(cpus=value)

    def getCpus(self) -> int:
        """Return it."""
        return self.getOrDefault(self.cpus)

    def setSlotTimeout(self: P, value: float) -> P:
        """Set it."""
        return self._set(slot_timeout=value)

    def getSlotTimeout(self) -> float:
        """Return it."""
        return self.getOrDefault(self.slot_timeout)

    def setRendezvousTimeout(self: P, value: float) -> P:
        """Set it."""
        return self._set(rendezvous_timeout=value)

    def getRendezvousTimeout(self) -> float:
        """Return it."""
        return self.getOrDefault(self.rendezvous_timeout)


class HasFeed(Params):
    """How rows are fed to the nodes."""

    feed_timeout: Param[float] = Param(
        Params._dummy(), "feed_timeout", "seconds for which a node may leave rows waiting", _to_seconds
    )
    spill: Param[bool] = Param(
        Params._dummy(),
        "spill",
        "whether the nodes keep their rows on local disk for the later epochs; otherwise Spark is asked for each",
        TypeConverters.toBoolean,
    )
    buffer_bytes: Param[int] = Param(
        Params._dummy(), "buffer_bytes", "bytes of rows that may wait in a node's memory", to_count
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(feed_timeout=600.0, spill=True, buffer_bytes=256 << 20)

    def setFeedTimeout(self: P, value: float) -> P:
        """Set it."""
        return self._set(feed_timeout=value)

    def getFeedTimeout(self) -> float:
        """Return it."""
        return self.getOrDefault(self.feed_timeout)

    def setSpill(self: P, value: bool) -> P:
        """Set it."""
        return self._set(spill=value)

    def getSpill(self) -> bool:
        """Return it."""
        return self.getOrDefault(self.spill)

    def setBufferBytes(self: P, value: int) -> P:
        """Set it."""
        return self._set(buffer_bytes=value)

    def getBufferBytes(self) -> int:
        """Return it."""
        return self.getOrDefault(self.buffer_bytes)


class HasRecovery(Params):
    """What a fit does when a node is lost."""

    restarts: Param[int] = Param(
        Params._dummy(),
        "restarts",
        "how often the nodes are gathered anew when one was lost, and train on from what they have saved",
        to_number,
    )
    min_workers: Param[int | None] = Param(
        Params._dummy(),
        "min_workers",
        "how many workers train on while a lost one is not back, with restarts; None: all wait for it",
        to_count,
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(restarts=0, min_workers=None)

    def setRestarts(self: P, value: int) -> P:
        """Set it."""
        return self._set(restarts=value)

    def getRestarts(self) -> int:
        """Return it."""
        return self.getOrDefault(self.restarts)

    def setMinWorkers(self: P, value: int | None) -> P:
        """Set it."""
        return self._set(min_workers=value)

    def getMinWorkers(self) -> int | None:
        """Return it."""
        return self.getOrDefault(self.min_workers)


class HasProgress(Params):
    """How a fit is shown."""

    progress: Param[str] = Param(
        Params._dummy(),
        "progress",
        "how a fit is shown: auto (in a notebook the panel; a line for each fit of a CrossValidator), widget, html, "
        "text or none",
        _to_progress,
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(progress="auto")

    def setProgress(self: P, value: str) -> P:
        """Set it."""
        return self._set(progress=value)

    def getProgress(self) -> str:
        """Return it."""
        return self.getOrDefault(self.progress)
