"""A ``fit`` that ends before its epochs tells that no more rows are wanted.

Keras' callbacks, ``EarlyStopping`` among them, end a ``fit`` by ``model.stop_training = True``. Nobody will then go
through the passes that are left, and what Spark still has to read would be read for nothing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tfos_nb.runtime.on_import import OnImport

__all__ = ["watch_fit"]

_FLAVOURS = ("keras", "tf_keras")


def watch_fit(begun: Callable[[], dict[str, int]], enough: Callable[[str], object]) -> None:
    """Have every ``fit`` of Keras 3 and of tf_keras tell when it was ended early.

    Parameters
    ----------
    begun : callable
        Counts the passes that were begun, by queue: only a ``fit`` that has begun one ends a feed.
    enough : callable
        Called after such a ``fit``, with the queue's name, if ``model.stop_training`` is set.
    """
    watch = _Watch(begun, enough)
    for flavour in _FLAVOURS:
        if flavour in sys.modules:
            watch(sys.modules[flavour])
        else:
            sys.meta_path.insert(0, OnImport(flavour, watch))


@dataclass(frozen=True)
class _Watch:
    begun: Callable[[], dict[str, int]]
    enough: Callable[[str], object]

    def __call__(self, keras: Any) -> None:
        """Wrap ``Model.fit`` of a Keras."""
        model: Any = getattr(keras, "Model", None)
        if model is not None:
            model.fit = self._wrapped(model.fit)

    def _wrapped(self, fit: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fit)
        def fit_that_tells(model: Any, *args: Any, **kwargs: Any) -> Any:
            before = self.begun()
            history = fit(model, *args, **kwargs)
            if getattr(model, "stop_training", False):
                for queue in [name for name, count in self.begun().items() if count != before[name]]:
                    self.enough(queue)
            return history

        return fit_that_tells
