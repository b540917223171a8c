"""Records that a read skipped, for the user to see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfos_nb.errors import PlanError
from tfos_nb.rich import Rich
from tfos_nb.runtime.tfrecord.files import plain
from tfos_nb.runtime.tfrecord.reading import Damage
from tfos_nb.spark.contexts import is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Skipped"]

_SHOWN = 5


class Skipped(Rich):
    """Counts the damaged records that ``read(…, mode="skip", skipped=…)`` leaves out.

    The counts are complete after the DataFrame was computed: they include the tasks that have ended so far. A file
    counts once, however often it is read.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession
        The session that reads; not of Spark Connect, which has no accumulators.

    Attributes
    ----------
    records : int
        Number of damaged places: single records, and rests of files that cannot be read.
    files : dict of str to Damage
        Damage that was left out, by file: the number of places, the byte and the reason of the first, and the byte
        from which nothing could be read.

    Examples
    --------
    >>> skipped = Skipped(spark)  # doctest: +SKIP
    >>> read(spark, "digits", mode="skip", skipped=skipped).count()  # doctest: +SKIP
    >>> skipped  # doctest: +SKIP
    1 damaged place in 1 file was left out: digits/part-0.tfrecord, byte 3021: the checksum of the record is wrong
    """

    _rich = "skipped"

    def __init__(self, spark: SparkSession) -> None:
        if is_connect(spark) or not hasattr(spark, "sparkContext"):
            raise PlanError("Skipped needs an accumulator, which Spark Connect does not support: use bad_column='…'")
        from tfos_nb.runtime.tfrecord.tally import DamageParam

        self.accumulator: Any = spark.sparkContext.accumulator({}, DamageParam())

    @property
    def files(self) -> dict[str, Damage]:
        """Damage that was left out, by file."""
        return dict(self.accumulator.value)

    @property
    def records(self) -> int:
        """Number of damaged places."""
        return sum(damage.records for damage in self.files.values())

    def __repr__(self) -> str:
        files = self.files
        if not files:
            return "nothing was left out"
        told = [f"{plain(url)}, byte {damage.first}: {damage.why}" for url, damage in sorted(files.items())[:_SHOWN]]
        more = f"; and {len(files) - _SHOWN} files more" if len(files) > _SHOWN else ""
        count = self.records
        return (
            f"{count} damaged place{'s' * (count != 1)} in {len(files)} file{'s' * (len(files) != 1)} "
            f"{'were' if count != 1 else 'was'} left out: {'; '.join(told)}{more}"
        )
