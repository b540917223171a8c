"""Count skipped records of all tasks on the driver, with a Spark accumulator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.accumulators import AccumulatorParam

from tfos_nb.runtime.tfrecord.reading import Damage

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DamageParam"]


class DamageParam(AccumulatorParam["dict[str, Damage]"]):
    """Accumulator of damage by file. A file that is read again by a repeated task counts once."""

    def zero(self, value: Mapping[str, Damage]) -> dict[str, Damage]:
        """Return an empty dictionary."""
        return {}

    def addInPlace(self, value1: dict[str, Damage], value2: dict[str, Damage]) -> dict[str, Damage]:  # noqa: N802
        """Add the damage of more files. Of two entries for one file, keep the one with more records."""
        for url, damage in value2.items():
            known = value1.get(url)
            if known is None or known.records <= damage.records:
                value1[url] = damage
        return value1
