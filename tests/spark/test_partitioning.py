"""Spark cuts files into the same partitions while a training may read them again."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from tfos_nb.spark.partitioning import SteadyPartitions

SETTING = "spark.sql.leafNodeDefaultParallelism"


def partitions(spark: SparkSession, path: str) -> int:
    return spark.read.parquet(path).rdd.getNumPartitions()


def test_files_are_cut_as_before_until_the_last_cluster_has_ended(spark: SparkSession, tmp_path: Path) -> None:
    own, path = spark.newSession(), str(tmp_path / "rows")
    own.range(0, 1000, 1, 8).write.parquet(path)
    own.conf.set("spark.sql.files.openCostInBytes", "1")
    first, second = SteadyPartitions(), SteadyPartitions()
    assert own.conf.get(SETTING, None) is None
    first.hold(own.range(1))
    first.hold(own.range(2))
    second.hold(own.range(1))
    assert first.parallelism == second.parallelism == int(own.conf.get(SETTING) or 0) >= 2
    many = partitions(own, path)
    second.use(1)
    assert partitions(own, path) < many, "as Spark cuts them with fewer cores"
    second.use(first.parallelism)
    assert partitions(own, path) == many
    first.release()
    first.release()
    assert int(own.conf.get(SETTING) or 0) == second.parallelism
    second.release()
    assert own.conf.get(SETTING, None) is None


def test_the_users_own_number_is_kept_and_an_rdd_needs_none(spark: SparkSession) -> None:
    own, partitions = spark.newSession(), SteadyPartitions()
    own.conf.set(SETTING, "7")
    partitions.hold(spark.sparkContext.range(3))
    assert partitions.parallelism == 0
    partitions.hold(own.range(1))
    assert partitions.parallelism == 7
    partitions.use(3)
    assert own.conf.get(SETTING) == "3"
    partitions.release()
    assert own.conf.get(SETTING) == "7"
