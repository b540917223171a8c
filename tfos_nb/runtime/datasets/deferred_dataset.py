"""A dataset that a program makes before its strategy: it runs no TensorFlow operation until it is used."""

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
    """Build a dataset; or, where a strategy may still be built that has to come first, when it is used.

    Parameters
    ----------
    source, options, failed, decode, **more
        What :func:`tfos_nb.runtime.datasets.dataset.build_dataset` takes.
    waits : bool
        Whether ``MultiWorkerMirroredStrategy`` may be built on this node.

    Raises
    ------
    FeedFailed
        For a column that is not there or has no tensor, naming it.
    """
    build = functools.partial(build_dataset, source, options, failed, decode, **more)
    if not waits or has_begun():
        return build()
    schema = source.schema()
    if schema is None:
        return build()  # which says why there is none
    chosen_columns(schema, options, decode is None)
    return _later_dataset()(build)


@functools.cache
def _later_dataset() -> Any:
    import tensorflow as tf

    class LaterDataset(tf.data.Dataset):  # type: ignore[misc]
        """Has all that a dataset has from the one that it builds when it is first asked for anything."""

        def __init__(self, build: Callable[[], tf.data.Dataset]) -> None:
            self._build = build  # and no more: what tf.data.Dataset would set is the built one's

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
