"""Make an archive of Spark's classes, with which Java starts quickly: ``python -m tests.quick_java``.

Many tests start Spark, in three JVMs that load ten thousand classes. JVMs that find the archive map it (class data
sharing, https://docs.oracle.com/en/java/javase/17/vm/class-data-sharing.html).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pyspark

from tests.local_cluster import ARCHIVE, environment, java_options

_SECONDS = 300

# A sample of the jobs that the tests run.
_PROGRAM = """
import sys

from pyspark.ml.feature import VectorAssembler
from pyspark.ml.functions import vector_to_array
from pyspark.sql import functions as F

from tests.local_cluster import builder

spark = builder(executors=1, cores=2).getOrCreate()
spark.sparkContext.setLogLevel("OFF")
spark.sparkContext.parallelize(range(2), 2).barrier().mapPartitions(lambda rows: [sum(rows)]).collect()
rows = spark.range(0, 1000, 1, 2).withColumn("x", F.col("id") * 2.0).withColumn("text", F.col("id").cast("string"))
rows = VectorAssembler(inputCols=["x"], outputCol="v").transform(rows).withColumn("a", vector_to_array("v"))
rows.drop("v").mapInArrow(lambda batches: batches, rows.drop("v").schema).write.parquet(sys.argv[1])
read = spark.read.parquet(sys.argv[1])
read.groupBy((F.col("id") % 7).alias("day")).agg(F.sum("x"), F.count("text")).orderBy("day").collect()
read.rdd.map(tuple).repartition(3).take(3)
spark.createDataFrame([(1, [0.5]), (2, None)], "id int, x array<double>").join(read, "id", "left").toPandas()
spark.stop()
"""


def make_archive() -> None:
    """Run a sample of jobs, and have the driver archive its loaded classes, which include an executor's."""
    home = Path(pyspark.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        script, archive = Path(folder, "program.py"), ARCHIVE.with_suffix(".new")
        script.write_text(_PROGRAM)
        archive.unlink(missing_ok=True)
        ended = subprocess.run(
            [home / "bin" / "spark-submit", script, f"{folder}/rows"],
            env={**os.environ, **environment(home), **java_options(f"-XX:ArchiveClassesAtExit={archive}")},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=_SECONDS,
        )
        shutil.rmtree(home / "work", ignore_errors=True)  # the executor's
        if ended.returncode == 0 and archive.exists():
            archive.replace(ARCHIVE)
        else:  # for example, a Java with few modules; the tests will show whether Spark works
            print(f"No archive of Spark's classes, so the tests go without:\n{ended.stdout[-500:]}")


if __name__ == "__main__":
    make_archive()
