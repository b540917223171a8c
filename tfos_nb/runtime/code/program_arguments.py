"""Arguments of a training program, as TensorFlowOnSpark's pipelines pass them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["Namespace"]


class Namespace(argparse.Namespace):
    """Arguments of a program as attributes.

    Parameters
    ----------
    given : mapping, argparse.Namespace, list or tuple, optional
        The arguments by name, or the words of a command line, which become ``argv``.

    Raises
    ------
    TypeError
        If ``given`` is of another type.

    Examples
    --------
    >>> "epochs" in Namespace({"epochs": 3})
    True
    >>> Namespace(["--epochs", "3"]).argv
    ['--epochs', '3']
    """

    argv: list[str]

    def __init__(self, given: Any = None) -> None:
        super().__init__()
        if isinstance(given, (list, tuple)):
            self.argv = list(given)
        elif isinstance(given, Mapping):
            self.__dict__.update(given)
        elif isinstance(given, argparse.Namespace):
            self.__dict__.update(vars(given))
        elif given is not None:
            raise TypeError(f"tf_args is a {type(given).__name__}: give a dictionary, a Namespace or a list")

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dict__)
