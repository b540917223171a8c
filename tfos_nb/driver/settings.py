"""Settings of a launch in addition to its plan, checked in one place before Spark is used or a cell is run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tfos_nb.errors import PlanError, check_count
from tfos_nb.records.runs import FOLDER, HOME
from tfos_nb.redaction import without_password
from tfos_nb.runtime.control.plan import ClusterPlan
from tfos_nb.runtime.storage.paths import absolute
from tfos_nb.runtime.storage.remote import Unreachable, refuse_unknown
from tfos_nb.runtime.storage.resumable import place_of_run
from tfos_nb.state.active_clusters import active_clusters

__all__ = ["Settings", "check_seconds", "checked_env", "deadline_after"]

_SHORTEST_SILENCE = 3.0  # seconds: a healthy node sends a heartbeat every second


@dataclass(frozen=True)
class Settings:
    """Arguments of :func:`tfos_nb.launch` beside the plan; it documents the fields. Times are in seconds."""

    model_dir: str | os.PathLike[str] | None = None
    tensorboard: bool = False
    log_dir: str | os.PathLike[str] | None = None
    autolog: bool = True
    env: dict[str, str] = field(default_factory=dict)
    rendezvous_timeout: float = 120.0
    feed_timeout: float = 600.0
    grace: float = 30.0
    buffer_bytes: int = 256 << 20
    spill_bytes: int = 1 << 50
    queues: tuple[str, ...] = ("input",)
    restarts: int = 0
    heartbeat_timeout: float = 15.0
    min_workers: int | None = None
    checkpoint_every: float | None = None
    resume: bool | str | os.PathLike[str] = False
    warm: bool = True
    warm_idle: float = 600.0
    record: bool | str | os.PathLike[str] = True
    apart: str = ""  # suffix of the default model_dir, which separates clusters of the same name

    def __post_init__(self) -> None:
        for name in ("rendezvous_timeout", "feed_timeout", "heartbeat_timeout"):
            check_seconds(name, getattr(self, name), above=0)
        for name in ("grace", "warm_idle"):
            check_seconds(name, getattr(self, name))
        if self.heartbeat_timeout < _SHORTEST_SILENCE:
            raise PlanError(
                f"heartbeat_timeout must be {_SHORTEST_SILENCE:g} seconds or more, got {self.heartbeat_timeout!r}: a "
                "healthy node sends a heartbeat every second"
            )
        if type(self.buffer_bytes) is not int or self.buffer_bytes < 1:
            raise PlanError(f"buffer_bytes must be a whole number of bytes, 1 or more, got {self.buffer_bytes!r}")
        if type(self.spill_bytes) is not int or self.spill_bytes < 0:
            raise PlanError(f"spill_bytes must be a whole number of bytes, got {self.spill_bytes!r}; 0 keeps none")
        check_count("restarts", self.restarts, 0)
        if self.min_workers is not None:
            check_count("min_workers", self.min_workers, 1)
        if self.min_workers is not None and not self.restarts:
            raise PlanError("min_workers= needs restarts=: without restarts the first loss ends the cluster")
        if self.checkpoint_every is not None:
            check_seconds("checkpoint_every", self.checkpoint_every, above=0)
        if self.checkpoint_every is not None and not self.restarts:
            raise PlanError("checkpoint_every= needs restarts=: without restarts the first loss ends the cluster")
        self._check_resume()
        self._check_kinds()
        self._check_names()

    def _check_resume(self) -> None:
        kinds: tuple[type, ...] = (bool, str, os.PathLike)
        if not isinstance(self.resume, kinds) or self.resume == "":
            raise PlanError(
                "resume must be True, for the run that was saved last in model_dir, or a run: its directory, or a "
                f"checkpoint in it, got {self.resume!r}"
            )
        if not self.resume:
            return
        if not self.restarts:
            raise PlanError("resume= needs restarts=: without restarts no state is kept that could be continued from")
        try:
            model_dir, _ = self._named_run
        except ValueError as error:
            raise PlanError(
                f"resume={str(error)!r} is no run: give its directory, MODEL_DIR/checkpoints/RUN, a "
                "checkpoint in it, or RUN with model_dir="
            ) from None
        if model_dir and self.model_dir and absolute(os.fspath(self.model_dir)).rstrip("/") != model_dir:
            raise PlanError(
                f"resume= names a run of model_dir={without_password(model_dir)!r}, but model_dir is "
                f"{without_password(os.fspath(self.model_dir))!r}: leave model_dir out"
            )

    @property
    def _named_run(self) -> tuple[str, str]:
        """The ``model_dir`` and the name of the run that ``resume`` names; empty if it names none."""
        if isinstance(self.resume, bool):
            return "", ""
        named = os.fspath(self.resume)
        model_dir, run = place_of_run(named if "/" not in named else absolute(named))
        return model_dir.rstrip("/"), run

    @property
    def resumed_run(self) -> str:
        """The run to continue; empty: the one that was saved last."""
        return self._named_run[1]

    def _check_kinds(self) -> None:
        for name in ("model_dir", "log_dir"):
            _check_place(name, getattr(self, name))
        if not isinstance(self.record, bool):
            if not self.record:
                raise PlanError(f"record must be True or False, or the directory of the record, got {self.record!r}")
            _check_place("record", self.record)
        for name in ("tensorboard", "autolog", "warm"):
            if not isinstance(getattr(self, name), bool):
                raise PlanError(f"{name} must be True or False, got {getattr(self, name)!r}")

    def _check_names(self) -> None:
        if not self.queues or any(type(name) is not str or name == "" for name in self.queues):
            raise PlanError(f"queues must be names, such as queues=['input', 'valid'], got {list(self.queues)!r}")
        if self.restarts and len(self.queues) > 1:
            raise PlanError("restarts= needs a single queue: a saved state records the position in one queue only")

    def check(self, plan: ClusterPlan) -> None:
        """Refuse settings that do not fit a plan."""
        if self.checkpoint_every is not None and plan.ps:
            raise PlanError(
                "checkpoint_every= is not for parameter servers: leave it out, and call ctx.checkpoint in main"
            )
        least = self.min_workers
        if least is None:
            return
        if plan.ps or plan.evaluator:
            raise PlanError(
                "min_workers= needs workers that train together, without parameter servers or an evaluator: leave it "
                "out, or leave those out"
            )
        if least > plan.workers:
            raise PlanError(f"min_workers must be at most {plan.workers}, the number of workers, got {least}")

    def for_plan(self, plan: ClusterPlan, taken: Collection[str] = ()) -> Settings:
        """Return the settings of a cluster of this plan, if they fit together.

        If another cluster of the same name runs, and both use the default ``model_dir``, this one gets its own;
        ``taken`` are those of clusters of other processes.
        """
        self.check(plan)
        if self.model_dir:
            return self
        if self._named_run[0]:
            return replace(self, model_dir=self._named_run[0])
        taken, fitting, number = {*taken, *(cluster.model_dir for cluster in active_clusters())}, self, 1
        while fitting.model_dir_for(plan.name) in taken:
            number += 1
            fitting = replace(self, apart=f"-{number}")
        return fitting

    def model_dir_for(self, name: str) -> str:
        """Return where ``ctx.save`` writes; a relative path is relative to the driver's directory, not the nodes'."""
        place = os.fspath(self.model_dir or os.path.join(HOME, name + self.apart))
        return place if "://" in place else os.path.abspath(place)

    def log_dir_for(self, name: str) -> str:
        """Return the directory that TensorBoard shows; empty without TensorBoard."""
        if self.log_dir:
            place = os.fspath(self.log_dir)
            return place if "://" in place else os.path.abspath(place)
        return f"{self.model_dir_for(name).rstrip('/')}/logs" if self.tensorboard else ""

    def with_absolute_paths(self, name: str) -> Settings:
        """Return the same for a process in another directory: relative paths are relative to this one's."""
        record = self.record if isinstance(self.record, bool) else absolute(os.fspath(self.record))
        log_dir = self.log_dir_for(name) if self.log_dir else self.log_dir
        return replace(self, model_dir=self.model_dir_for(name), log_dir=log_dir, record=record)

    def run_file_for(self, name: str, run: str, started: float) -> str:
        """Return the file that a run is recorded in; empty if it is not."""
        if self.record is False:
            return ""
        home = self.model_dir_for(name) if self.record is True else os.fspath(self.record)
        when = time.strftime("%Y%m%d-%H%M%S", time.gmtime(started))
        return f"{absolute(home).rstrip('/')}/{FOLDER}/{when}-{run}.json"

    def for_nodes(self, name: str) -> dict[str, object]:
        """Return the settings that the nodes need."""
        return {
            "model_dir": self.model_dir_for(name),
            "place_given": bool(self.model_dir),
            "log_dir": self.log_dir_for(name),
            "autolog": self.autolog,
            "buffer_bytes": self.buffer_bytes,
            "spill_bytes": self.spill_bytes,
            "queues": list(self.queues),
            "restarts": self.restarts,
            "checkpoint_every": self.checkpoint_every,
            "heartbeat_timeout": self.heartbeat_timeout,
            "warm_idle": self.warm_idle,
        }


def _check_place(name: str, place: Any) -> None:
    """Refuse what cannot be a directory that nodes and driver share."""
    if not isinstance(place, (str, os.PathLike, type(None))):
        raise PlanError(f"{name} must be a path, or a URL, got {place!r}")
    if str(place).startswith("memory:"):
        raise PlanError(
            f"{name}={place!r} cannot be shared: a memory: URL exists in one process only and "
            "ends with it. Give a path, or a URL that the nodes share"
        )
    if place and os.path.isfile(place):
        raise PlanError(f"{name}={place!r} is a file: give a directory, which may be a new one")
    try:
        refuse_unknown(os.fspath(place or ""))
    except Unreachable as error:
        raise PlanError(f"{name}: {error}") from None


def checked_env(env: Mapping[str, str] | None) -> dict[str, str]:
    """Return the user's environment variables; refuse those that a process cannot have."""
    if not isinstance(env, (Mapping, type(None))):
        raise PlanError(f"env must be a dictionary, as in env={{'TF_USE_LEGACY_KERAS': '1'}}, got {env!r}")
    given = dict(env or {})
    for name, value in given.items():
        if any(not isinstance(part, str) for part in (name, value)):
            raise PlanError(
                "names and values of env must be text, as in env={'TF_USE_LEGACY_KERAS': '1'}, got "
                f"{name!r} with a value of type {type(value).__name__}"
            )
        if not name or "=" in name or "\0" in name:
            raise PlanError(f"env: a variable's name must not be empty or contain '=' or NUL, got {name!r}")
        if "\0" in value:
            raise PlanError(f"env: the value of {name!r} must not contain NUL ('\\0'); remove it")
    return given


def check_seconds(name: str, value: Any, above: float | None = None) -> float:
    """Return a number of seconds, 0 or more, or more than ``above``; refuse any other value."""
    least = "0 or more" if above is None else f"above {above:g}"
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and (value >= 0 if above is None else value > above) and value <= threading.TIMEOUT_MAX:
        return float(value)
    most = f"at most {threading.TIMEOUT_MAX:.0f}"
    raise PlanError(f"{name} must be a number of seconds, {least} and {most}, got {value!r}")


def deadline_after(timeout: Any) -> float | None:
    """Return the deadline of a timeout on the monotonic clock; None without a timeout. One below 0 is over now."""
    if timeout is None:
        return None
    past = isinstance(timeout, (int, float)) and timeout < 0
    return time.monotonic() + check_seconds("timeout", 0 if past else timeout)
