"""Inference through a running cluster, from the driver: rows go to the nodes, and results come back to Spark.

::

    cluster.inference(df, "prediction double") ─▶ df.mapInArrow(InferTask): lazy
    somebody asks for rows ─▶ Spark tasks ◀── Arrow Flight ──▶ nodes

The driver carries no row. It tells the tasks where the nodes are (:mod:`tfos_nb.runtime.control.placement`).
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tfos_nb.cluster_view import ClusterView
from tfos_nb.driver.settings import Settings, check_seconds
from tfos_nb.errors import PlanError
from tfos_nb.runtime.control.door import DoorAddress
from tfos_nb.runtime.control.plan import InputMode
from tfos_nb.runtime.inference.serving import InferTask

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["Inferring", "check_queue"]


def check_queue(name: str, settings: Settings) -> str:
    """Return the name of a queue of a cluster.

    Raises
    ------
    PlanError
        If there is no such queue.
    """
    if name not in settings.queues:
        known = ", ".join(repr(queue) for queue in settings.queues)
        raise PlanError(f"qname={name!r}: this cluster has {known}. Launch it with queues=[{name!r}, …]")
    return name


class Inferring(ClusterView):
    """The part of :class:`tfos_nb.Cluster` that has rows answered."""

    _settings: Settings
    _address: DoorAddress

    def inference(
        self,
        data: Any,
        schema: str | StructType | None = None,
        *,
        columns: Sequence[str] | None = None,
        keep: bool = True,
        qname: str = "input",
        feed_timeout: float | None = None,
    ) -> Any:
        """Have the rows of a DataFrame or an RDD answered by ``main``: one result a row.

        Nothing happens before somebody asks for the results; then the cluster has to be running still. The rows of a
        partition go to one node, on the same host if there is one, and the results come back in the rows' order, in the
        same partition. A task that Spark repeats has its rows answered anew.

        Parameters
        ----------
        data : pyspark.sql.DataFrame or pyspark.RDD
            The rows. Of an RDD: Rows, dictionaries, tuples or single values.
        schema : str or StructType
            The columns of the results, such as ``"prediction double"``. For a DataFrame only.
        columns : list of str, optional
            The columns that ``main`` gets; all by default. For a DataFrame only.
        keep : bool
            Whether the DataFrame's own columns stand before those of the results.
        qname : str
            The queue from which ``main`` takes the rows.
        feed_timeout : float, optional
            Seconds for which rows may wait while ``main`` neither takes nor answers any; the cluster's by default.

        Returns
        -------
        DataFrame or RDD
            Of the results, lazy. An RDD's elements are what ``main`` gave.

        Raises
        ------
        PlanError
            If the data are neither, the schema is missing or none, or a column is not there.
        ClusterClosed, NodeFailed
            If the cluster has ended.

        Examples
        --------
        >>> def main(args, ctx):  # doctest: +SKIP
        ...     model = keras.models.load_model(args["model"])
        ...     for batch in ctx.requests(512):
        ...         batch.reply({"prediction": model(batch["pixels"])[:, 0]})
        >>> with launch(main, args, workers=2) as cluster:  # doctest: +SKIP
        ...     cluster.inference(df, "prediction float").write.parquet("scored")
        """
        if self.plan.input_mode is InputMode.TENSORFLOW:
            raise PlanError(
                "this cluster reads files itself (input_mode='tensorflow'): launch it with input_mode='spark'"
            )
        check_queue(qname, self._settings)
        timeout = self._settings.feed_timeout if feed_timeout is None else feed_timeout
        timeout = check_seconds("feed_timeout", timeout, above=0)
        self._refuse_if_over("inference")
        task = InferTask(self._address, self.plan.name, uuid.uuid4().hex, qname, timeout)
        if hasattr(data, "mapInArrow"):
            return _of_frame(task, data, schema, columns, keep)
        return _of_rdd(task, data, schema, columns)


def _of_rdd(task: InferTask, data: Any, schema: Any, columns: Any) -> Any:
    from pyspark import RDD

    if not isinstance(data, RDD):
        raise PlanError(
            f"a {type(data).__name__} cannot be answered: give a Spark DataFrame or an RDD, such as "
            "spark.createDataFrame(…)"
        )
    if schema is not None or columns is not None:
        raise PlanError(
            "schema and columns are for a DataFrame: an RDD's results are what main gave. Make one of them with "
            "spark.createDataFrame(cluster.inference(rdd), schema)"
        )
    return data.mapPartitions(replace(task, rows=True), preservesPartitioning=True)


def _of_frame(task: InferTask, frame: Any, schema: Any, columns: Sequence[str] | None, keep: bool) -> Any:
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    added = _struct(schema)
    sent = _places(frame, columns)
    if not keep:
        frame, sent = frame.select(*(frame.columns[place] for place in sent)), tuple(range(len(sent)))
    names = tuple(frame.columns)
    clash = [name for name in added.names if keep and name in names]
    if clash:
        raise PlanError(
            f"schema: the DataFrame has a column {clash[0]!r} already: name the result otherwise, or keep=False"
        )
    task = replace(task, schema=to_arrow_schema(added).serialize().to_pybytes(), names=names, sent=sent, keep=keep)
    whole = StructType([*frame.schema.fields, *added.fields]) if keep else added
    try:
        # By position: Spark's own look-up by name fails for a dot in a name, and for two columns of one name.
        return frame.toDF(*(f"c{place}" for place in range(len(names)))).mapInArrow(task, whole)
    except PySparkException as error:
        told = str(error).splitlines()[0]
        raise PlanError(f"Spark cannot hand these columns to Python: {told}. Leave them out with df.drop(…)") from error


def _struct(schema: Any) -> StructType:
    from pyspark.errors import PySparkException
    from pyspark.sql.types import StructType, _parse_datatype_string

    if schema is None:
        raise PlanError("inference of a DataFrame needs the columns of the results, such as schema='prediction double'")
    if isinstance(schema, str):
        try:
            schema = _parse_datatype_string(schema)
        except PySparkException as error:
            raise PlanError(
                f"schema={schema!r}: {str(error).strip().splitlines()[0]}. It is as 'prediction double'"
            ) from None
    if not isinstance(schema, StructType) or not schema.fields:
        raise PlanError(f"schema must be a StructType, or a text such as 'prediction double', got {schema!r}")
    return schema


def _places(frame: Any, columns: Sequence[str] | None) -> tuple[int, ...]:
    if not frame.columns:
        raise PlanError("the DataFrame has no columns")
    if columns is None:
        return tuple(range(len(frame.columns)))
    if isinstance(columns, str) or not columns:
        raise PlanError(f"columns must be a list of names of columns, got {columns!r}")
    for name in columns:
        if frame.columns.count(name) != 1:
            raise PlanError(
                f"columns: {frame.columns.count(name)} columns are called {name!r}; there are {frame.columns}"
            )
    return tuple(frame.columns.index(name) for name in columns)
