"""The arguments of a training program, as a program of a command line or of a pipeline has them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["Namespace"]


class Namespace(argparse.Namespace):
    """The arguments of a program: of a dictionary, an ``argparse.Namespace``, or a list, which becomes ``argv``.

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
