"""Defer the building of a dataset until it is used, so that a program may make its strategy after it.

A strategy that spans several workers must be built before the first TensorFlow operation
(:mod:`tfos_nb.runtime.code.first_use`), and building a dataset runs operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.code.first_use import has_begun
from tfos_nb.runtime.datasets.dataset import DatasetOptions, Source, build_dataset, chosen_columns

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["dataset_of"]

Decode = Callable[[dict[str, Any]], dict[str, Any]]


def dataset_of(
    source: Source,
    options: DatasetOptions,
    failed: Callable[[FeedFailed], object],
    decode: Decode | None = None,
    *,
    waits: bool,
    **more: Any,
) -> tf.data.Dataset:
    """Build a dataset now; or when it is used, if a strategy that must be built before it may still follow.

    Parameters
    ----------
    source, options, failed, decode, **more
        Arguments of :func:`tfos_nb.runtime.datasets.dataset.build_dataset`.
    waits : bool
        Whether ``MultiWorkerMirroredStrategy`` may be built on this node.

    Raises
    ------
    FeedFailed
        If no rows will come, or a column does not exist or cannot be a tensor. It is raised now in both cases, except
        for columns that ``decode`` makes: these are checked when the dataset is built.
    """
    build = functools.partial(build_dataset, source, options, failed, decode, **more)
    if not waits or has_begun():
        return build()
    schema = source.schema()
    if schema is None:
        return build()  # raises the error
    chosen_columns(schema, options, decode is None)
    return _later_dataset()(build)


@functools.cache
def _later_dataset() -> Any:
    import tensorflow as tf

    class LaterDataset(tf.data.Dataset):  # type: ignore[misc]
        """Dataset that takes all its attributes from another one, which it builds when an attribute is first read."""

        def __init__(self, build: Callable[[], tf.data.Dataset]) -> None:
            self._build = build  # super().__init__ is not called: the attributes that it sets come from the built one

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__") or name in ("_build", "_built"):
                raise AttributeError(name)
            if "_built" not in self.__dict__:
                self.__dict__["_built"] = self._build()
            return getattr(self.__dict__["_built"], name)

        @property
        def element_spec(self) -> Any:
            return self.__getattr__("element_spec")

        def _inputs(self) -> list[Any]:
            inputs: list[Any] = self.__getattr__("_inputs")()
            return inputs

    return LaterDataset
