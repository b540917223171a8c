"""Find the line of a program that first uses TensorFlow, for the error of a strategy that is built too late.

``MultiWorkerMirroredStrategy`` gives TensorFlow's runtime the addresses of the other workers. It can do so only before
the runtime starts. The first operation starts the runtime, and datasets and layers run operations too.
"""

from __future__ import annotations

import functools
import linecache
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfos_nb.errors import PlanError

__all__ = ["has_begun", "note_first_use"]

_OURS = str(Path(__file__).parents[2])
_PYTHONS = str(Path(linecache.__file__).parent)
_INSTALLED = re.compile(r"/(site|dist)-packages/")
_TOO_LATE = "Collective ops must be configured at program startup"
_first: list[str] = []


def note_first_use() -> None:
    """Record which line of the user's program starts TensorFlow, and name it in the error of a strategy built later.

    Must be called before the user's code. Further calls have no effect. It runs no TensorFlow operation.
    """
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy
    if hasattr(strategy.__init__, "tfos_nb_advises"):
        return
    strategy.__init__ = _advising(strategy.__init__)
    try:
        from tensorflow.python.eager.context import Context

        Context.ensure_initialized = _noting(Context, Context.ensure_initialized)
    except (ImportError, AttributeError):  # a private class of TensorFlow; without it the error names only one line
        pass


def has_begun() -> bool:
    """Return whether TensorFlow's runtime has started; True if this TensorFlow does not tell."""
    from tensorflow.python.eager import context

    return bool(getattr(context.context(), "_initialized", True))  # a private attribute, so it may be missing


def _noting(owner: Any, ensure_initialized: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap the method that starts the runtime. The wrapper removes itself when the runtime has started."""

    @functools.wraps(ensure_initialized)
    def note(self: Any) -> None:
        if not self._initialized and not _first:
            _first.append(_users_line())
        ensure_initialized(self)
        owner.ensure_initialized = ensure_initialized

    return note


def _advising(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def init_or_advise(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except RuntimeError as error:
            if _TOO_LATE not in str(error):
                raise
            raise PlanError(_advice(_first[0] if _first else "", _users_line())) from error

    init_or_advise.tfos_nb_advises = True  # type: ignore[attr-defined]
    return init_or_advise


def _advice(first: str, late: str) -> str:
    used = f"first used at {first}" if first else "used before"
    built = f", and the strategy is built at {late}" if late else ""
    return (
        f"the strategy must be built before TensorFlow is used; it was {used}{built}. Build it first in main: move "
        "strategy = ctx.strategy() (or tf.distribute.MultiWorkerMirroredStrategy()) to main's first line"
    )


def _users_line() -> str:
    """Return file, line and text of the innermost running line of the user's code; empty if there is none."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not _INSTALLED.search(file) and not file.startswith((_OURS, _PYTHONS, "<frozen")):
            text = linecache.getline(file, frame.f_lineno).strip()
            return f"{file}, line {frame.f_lineno}" + (f" ({text})" if text else "")
        frame = frame.f_back
    return ""
