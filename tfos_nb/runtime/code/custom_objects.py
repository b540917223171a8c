"""Send the user's code that a model needs to the executors: custom objects, and the function that builds the model.

The code is pickled by value on the driver, and sent as bytes in Spark's own task closure. So Spark does not unpickle it
when it reads the task. The process that applies the model unpickles it, after it has set up TensorFlow.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tfos_nb.errors import PlanError
from tfos_nb.runtime.code import source_text
from tfos_nb.runtime.code.payload import pickled_by_value

__all__ = ["ModelCode", "pack", "unpack"]


@dataclass(frozen=True)
class ModelCode:
    """User code that a model needs.

    Parameters
    ----------
    custom_objects : mapping
        The user's own classes and functions, by their names in the model's file.
    function : callable or None
        Function that builds the model, or that is applied itself.
    args : tuple
        First positional arguments of the function.
    """

    custom_objects: Mapping[str, Any] = field(default_factory=dict)
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()


def pack(code: ModelCode) -> bytes:
    """Pickle code by value. Return empty bytes if there is no code.

    Raises
    ------
    PlanError
        If the code refers to an object that cannot be pickled.
    """
    if not code.custom_objects and code.function is None and not any(code.args):
        return b""
    own = [value for value in (*code.custom_objects.values(), code.function) if value is not None]
    with contextlib.ExitStack() as stack:
        for value in own:
            stack.enter_context(pickled_by_value(value))
        try:
            data, found = source_text.dumps(code)
        except Exception as error:
            what = str(error).splitlines()[0] if str(error) else type(error).__name__
            names = ", ".join(getattr(value, "__name__", type(value).__name__) for value in own)
            raise PlanError(f"{names}: an object that it refers to cannot be sent to the executors: {what}") from error
    return pickle.dumps((data, found))


def unpack(data: bytes) -> ModelCode:
    """Return the code from the result of :func:`pack`, in the process that applies the model."""
    # Unpickling is safe here: the bytes come from Spark's task closure, never from a socket.
    if not data:
        return ModelCode()
    pickled, found = pickle.loads(data)  # noqa: S301
    source_text.remember(found)
    code: ModelCode = pickle.loads(pickled)  # noqa: S301
    return code
