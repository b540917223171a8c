"""Common parts of the Estimators: their Params, the rows that they feed, the fit, writing and reading."""

from __future__ import annotations

import itertools
import os
import threading
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from pyspark.ml.util import MLReadable, MLWritable
from pyspark.sql import DataFrame

from tfos_nb.errors import PlanError
from tfos_nb.inference.frames import check_frame
from tfos_nb.pipeline.conversion import TFParams
from tfos_nb.pipeline.fitting import Fit
from tfos_nb.pipeline.params import (
    HasBatchSize,
    HasClusterSize,
    HasEpochs,
    HasFeed,
    HasGraceSecs,
    HasInputMapping,
    HasMlflow,
    HasModelDir,
    HasProgress,
    HasRecovery,
    HasResources,
    HasRowRoles,
    HasTensorboard,
)
from tfos_nb.pipeline.scorer import HasRows
from tfos_nb.pipeline.selection import parted
from tfos_nb.pipeline.storage import ScorerReader, ScorerWriter
from tfos_nb.records.runs import HOME
from tfos_nb.runtime.storage.paths import absolute
from tfos_nb.spark.session import usable_session

__all__ = ["Fitting", "new_home"]

E = TypeVar("E", bound="Fitting")

_fits = itertools.count(1)


class Fitting(
    HasInputMapping,
    HasModelDir,
    HasBatchSize,
    HasClusterSize,
    HasEpochs,
    HasTensorboard,
    HasGraceSecs,
    HasRows,
    HasRowRoles,
    HasResources,
    HasFeed,
    HasRecovery,
    HasProgress,
    HasMlflow,
    TFParams,
    MLReadable[Any],
    MLWritable,
):
    """An Estimator that starts a cluster for each fit.

    Attributes
    ----------
    validation : DataFrame or None
        Rows to validate on.
    """

    validation: DataFrame | None = None

    def setValidation(self: E, value: DataFrame | None) -> E:
        """Set the rows to validate on; the other way is the Param ``validationIndicatorCol``."""
        if value is not None:
            check_frame(value)
        self.validation = value
        return self

    def getValidation(self) -> DataFrame | None:
        """Return the rows to validate on."""
        return self.validation

    def _parts(self, dataset: Any) -> tuple[DataFrame, DataFrame | None]:
        """Return the rows to train on and those to validate on."""
        check_frame(dataset)
        usable_session(dataset.sparkSession)
        if dataset.isStreaming:
            raise PlanError(
                "fit cannot use a stream, which has no end: train on a stream with tfos_nb.launch and cluster.train"
            )
        indicator: str | None = self.getOrDefault(self.validationIndicatorCol)
        return parted(dataset, indicator, self.validation)

    def _weight(self) -> list[str]:
        column: Any = self.getOrDefault(self.weightCol)
        return [] if column is None else [column]

    def fitMultiple(self, dataset: DataFrame, paramMaps: Sequence[dict[Any, Any]]) -> Iterator[tuple[int, Any]]:
        """Fit once for each map of Params; a tuner calls it."""
        if self.getResume() or any(values.get(self.resume) for values in paramMaps):
            raise PlanError(_OF_ONE_FIT)
        return super().fitMultiple(dataset, paramMaps)  # type: ignore[misc, no-any-return]

    def _check_resume(self) -> None:
        if not self.getResume():
            return
        if self.getModelDir() is None:
            raise PlanError(
                "resume needs model_dir, where the fit that was interrupted has saved its state: without one, each fit "
                "has a directory of its own"
            )
        if threading.current_thread() is not threading.main_thread():  # a tuner's, which fits a Pipeline
            raise PlanError(_OF_ONE_FIT)

    def _fit_of(self, home: str, plan: dict[str, Any], writes: tuple[str, ...] = ()) -> Fit:
        """Return the settings of a fit, with a new name."""
        kind = type(self).__name__
        settings = {
            "model_dir": absolute(home),
            "record": self.getModelDir() is not None or absolute(os.path.join(HOME, kind)),
            "tensorboard": self.getTensorboard(),
            "grace": float(self.getGraceSecs()),
            "rendezvous_timeout": self.getRendezvousTimeout(),
            "feed_timeout": self.getFeedTimeout(),
            "buffer_bytes": self.getBufferBytes(),
            "restarts": self.getRestarts(),
            "min_workers": self.getMinWorkers(),
            "checkpoint_every": self.getCheckpointEvery(),
            "resume": self.getResume(),
        }
        return Fit(
            f"{kind}-{next(_fits)}",
            {"cpus": self.getCpus(), "gpus": self.getGpus(), **plan},
            settings,
            self.getProgress(),
            self.getSlotTimeout(),
            self._what(),
            writes,
            self._recorded(),
            self.getMlflow(),
        )

    def _recorded(self) -> dict[str, Any]:
        """Return the arguments that the record of a fit has: the Params that were set."""
        return {param.name: value for param, value in self._paramMap.items()}

    def _what(self) -> str:
        """Say which numbers were set: these tell the fits of a CrossValidator apart."""
        told = {
            param.name: value
            for param, value in self._paramMap.items()
            if isinstance(value, (int, float))
            and not isinstance(value, bool)
            and value != self._defaultParamMap.get(param)
        }
        return ", ".join(f"{name}={value:g}" for name, value in sorted(told.items()))

    def write(self) -> ScorerWriter:
        """Return what saves it."""
        return ScorerWriter(self)

    @classmethod
    def read(cls) -> ScorerReader:
        """Return what loads it."""
        return ScorerReader(cls)

    def _refuse_frame(self) -> None:
        if self.validation is not None:
            raise PlanError(
                "a validation DataFrame cannot be saved: use validationIndicatorCol, or setValidation(None)"
            )


_OF_ONE_FIT = (
    "resume continues one fit, by a call of fit in the main thread. The fits of a tuner would continue each other: "
    "setResume(False)"
)


def new_home(kind: str) -> str:
    """Return a directory for one fit, under the driver's working directory."""
    return os.path.join(os.getcwd(), HOME, f"{kind}-{uuid.uuid4().hex[:8]}")
