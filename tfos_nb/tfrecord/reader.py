"""Read TFRecord files as a DataFrame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfos_nb.errors import PlanError
from tfos_nb.runtime.tfrecord.files import DataFile, NoFileSystem, Opener, absolute, found, open_file
from tfos_nb.runtime.tfrecord.plan import SAMPLE, Asked, ask, plan
from tfos_nb.runtime.tfrecord.reading import ReadTask, shares
from tfos_nb.spark.contexts import check_session, context_of
from tfos_nb.spark.tfrecord_source import register_if_possible
from tfos_nb.tfrecord import hadoop

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from tfos_nb.tfrecord.skipped import Skipped

__all__ = ["infer_schema", "read"]


def read(
    spark: SparkSession,
    path: Any,
    *,
    schema: StructType | str | None = None,
    record_type: str = "Example",
    mode: str = "fail",
    skipped: Skipped | None = None,
    bad_column: str = "",
    binary: Sequence[str] = (),
    lengths: Mapping[str, int] | None = None,
    sample: int = SAMPLE,
) -> DataFrame:
    """Read TFRecord files as a DataFrame.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession
        The session that reads.
    path : str, path, or list of them
        A file, a directory, or a pattern; a path that all executors reach, or a URL. Directories ``column=value`` give
        partition columns. Compressed files (gzip, zlib) are known by their first bytes. URLs that fsspec does not
        support are read by Spark's own Hadoop file system, file by file.
    schema : StructType or str, optional
        The columns, in the types of :func:`tfos_nb.tfrecord.write`. A record without such a feature gives null.
        Default: the columns of a sample of the records, sorted by name; numbers are ``bigint`` and ``float``, bytes are
        ``string`` where all in the sample are UTF-8, else ``binary``.
    record_type : str
        ``Example`` or ``SequenceExample``, whose feature lists are arrays of arrays.
    mode : str
        ``fail`` at a damaged record, with its file and byte; or ``skip`` it. If a record's length is damaged, nothing
        after it can be found.
    skipped : Skipped, optional
        Counts the records that ``skip`` leaves out.
    bad_column : str
        Let ``skip`` give each damage a row, with all null but this column, which says where and why. It stands last,
        or where the schema declares it.
    binary : sequence of str
        Columns of bytes to infer as ``binary`` where all in the sample are UTF-8.
    lengths : mapping of str to int, optional
        How many values the arrays of a column have to have.
    sample : int
        About how many records to look at, of up to ten files. 0: none, which a declared schema allows; then nothing is
        read before the DataFrame is computed.

    Returns
    -------
    DataFrame
        Computed when its rows are used. The order of files and records is kept within a partition.

    Raises
    ------
    PlanError
        If the path does not exist, or if a record of the sample is not of type ``record_type``, disagrees with others
        about a column, or does not fit the schema. Raised before Spark reads anything.

    Examples
    --------
    >>> read(spark, "digits", schema="pixels array<float>, label int").show()  # doctest: +SKIP
    """
    asked = _asked(spark, locals())
    files, opener, task = _listed(spark, path)
    planned = plan(asked, files, opener, tally=None if skipped is None else skipped.accumulator)
    struct = _struct(planned.schema)
    if task is not None:
        return hadoop.read(spark, files, planned.reading, struct)
    dealt = shares(files, context_of(spark).cores())
    numbers = spark.range(0, len(dealt), 1, max(1, len(dealt)))
    return numbers.mapInArrow(ReadTask(planned.reading, dealt), struct)


def infer_schema(
    spark: SparkSession,
    path: Any,
    *,
    record_type: str = "Example",
    mode: str = "fail",
    binary: Sequence[str] = (),
    sample: int = SAMPLE,
) -> StructType:
    """Return the schema that :func:`read` infers; the parameters are its own.

    Examples
    --------
    >>> infer_schema(spark, "digits").simpleString()  # doctest: +SKIP
    'struct<label:bigint,pixels:array<float>>'
    """
    asked = _asked(spark, {**locals(), "schema": None, "lengths": None, "bad_column": "", "skipped": None})
    files, opener, _ = _listed(spark, path)
    return _struct(plan(asked, files, opener).schema)


def _asked(spark: Any, given: Mapping[str, Any]) -> Asked:
    check_session(spark, "give the session first, as in read(spark, path)")
    register_if_possible(spark)
    mode = "skip" if given["skipped"] is not None and given["mode"] == "fail" else given["mode"]
    return ask(
        schema=_json(given["schema"]),
        record_type=given["record_type"],
        mode=mode,
        bad_column=given["bad_column"],
        binary=given["binary"],
        lengths=given["lengths"],
        sample=given["sample"],
    )


def _json(schema: Any) -> dict[str, Any] | None:
    """Return a declared schema as JSON."""
    from pyspark.errors import PySparkException
    from pyspark.sql.types import DataType, StructType

    if schema is None:
        return None
    if isinstance(schema, str):
        try:
            schema = DataType.fromDDL(schema) if hasattr(DataType, "fromDDL") else _parsed(schema)
        except PySparkException as error:
            raise PlanError(
                f"schema must be as in 'x float', got {schema!r}: {str(error).strip().splitlines()[0]}"
            ) from error
    if not isinstance(schema, StructType) or not schema.fields:
        raise PlanError(
            "schema must be a StructType with columns, or text such as 'pixels array<float>, label int', got "
            f"{schema!r}"
        )
    return dict(schema.jsonValue())


def _parsed(ddl: str) -> Any:
    """Parse a schema if PySpark has no method for it (3.5)."""
    from pyspark.sql import types

    return types._parse_datatype_string(ddl)


def _struct(schema: dict[str, Any]) -> StructType:
    from pyspark.sql.types import StructType

    return StructType.fromJson(schema)


def _listed(spark: SparkSession, path: Any) -> tuple[list[DataFile], Opener, str | None]:
    """List the files at some paths: how the driver opens them, and why Spark has to read them, if it has."""
    paths = [absolute(one) for one in (path if isinstance(path, (list, tuple)) else [path])]
    if not paths:
        raise PlanError("path=[]: give at least one")
    try:
        return [file for one in paths for file in found(one)], open_file, None
    except NoFileSystem as error:
        return hadoop.found(spark, paths, str(error)), hadoop.opener(spark), str(error)
