"""The count of what was left out, which comes from the tasks to the driver by one of Spark's accumulators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.accumulators import AccumulatorParam

from tfos_nb.runtime.tfrecord.reading import Damage

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DamageParam"]


class DamageParam(AccumulatorParam["dict[str, Damage]"]):
    """Adds up damage by file. A file that is read twice, by a task that Spark ran again, counts once."""

    def zero(self, value: Mapping[str, Damage]) -> dict[str, Damage]:
        """Begin with nothing."""
        return {}

    def addInPlace(self, value1: dict[str, Damage], value2: dict[str, Damage]) -> dict[str, Damage]:  # noqa: N802
        """Take the damage of more files in."""
        for url, damage in value2.items():
            known = value1.get(url)
            if known is None or known.records <= damage.records:
                value1[url] = damage
        return value1
