"""Convert the values of the pipeline's Params, and merge the Params into a training program's arguments."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

from pyspark.ml.param import Params

from tfos_nb.errors import near
from tfos_nb.runtime.code.program_arguments import Namespace
from tfos_nb.runtime.control.plan import InputMode

__all__ = ["Namespace", "TFParams", "to_count", "to_input_mode", "to_mapping", "to_number", "to_path", "to_text"]

# Spark ML asks for a TypeError, and puts the Param's name before its message.


def to_mapping(value: Any) -> dict[str, str]:
    """Take a dictionary of text."""
    if isinstance(value, Mapping) and all(isinstance(text, str) and text for pair in value.items() for text in pair):
        return dict(value)
    raise TypeError(f"the value must be a dictionary of names, such as {{'name': 'name'}}, got {value!r}")


def to_path(value: Any) -> str:
    """Take a path or a URL."""
    if isinstance(value, (str, os.PathLike)) and os.fspath(value):
        return os.fsdecode(value)
    raise TypeError(f"the value must be a path or a URL, got {value!r}")


def to_text(value: Any) -> str:
    """Take text."""
    if isinstance(value, str) and value:
        return value
    raise TypeError(f"the value must be a text that is not empty, got {value!r}")


def to_count(value: Any) -> int:
    """Take a whole number, 1 or more."""
    if to_number(value) < 1:
        raise TypeError(f"the value must be a whole number, 1 or more, got {value!r}")
    return int(value)


def to_number(value: Any) -> int:
    """Take a whole number, 0 or more."""
    whole = isinstance(value, (int, float)) and not isinstance(value, bool) and value == int(value)
    if not whole or value < 0:
        raise TypeError(f"the value must be a whole number, 0 or more, got {value!r}")
    return int(value)


def to_input_mode(value: Any) -> str:
    """Take an InputMode, its name, or the number that TensorFlowOnSpark has for it; a saved Param is text."""
    numbers = {0: InputMode.TENSORFLOW, 1: InputMode.SPARK}
    try:
        return InputMode(numbers.get(value, value.lower() if isinstance(value, str) else value)).value
    except ValueError:
        raise TypeError(f"the value must be 'spark' or 'tensorflow', got {value!r}") from None


class TFParams(Params):
    """Params in addition to the arguments of a program.

    Attributes
    ----------
    args : Namespace
        The program's own arguments.
    """

    args: Namespace

    def _set_all(self, given: Mapping[str, Any]) -> None:
        """Set Params by keywords."""
        names = [param.name for param in self.params]
        for name in given:
            if name not in names:
                raise TypeError(
                    f"{type(self).__name__} has no Param {name!r}{near(name, names)}; it has {', '.join(names)}"
                )
        self._set(**given)

    def merge_args_params(self) -> Namespace:
        """Return a copy of the arguments with every Param that has a value laid over them."""
        merged = Namespace(copy.copy(self.args))
        for param, value in self.extractParamMap().items():
            setattr(merged, param.name, value)
        return merged
