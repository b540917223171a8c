"""Models called in SQL."""

from __future__ import annotations

import pytest
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from tests.saved_models import close, column
from tfos_nb import register_udf
from tfos_nb.errors import PlanError


@pytest.fixture(scope="module")
def table(rows):
    rows.createOrReplaceTempView("digits")
    return "digits"


def test_a_model_is_called_in_sql(spark, table, kinds, known):
    again = register_udf(spark, "dense_of", kinds / "dense.keras", batch_size=7)
    assert close(column(spark.sql(f"SELECT id, dense_of(x) AS p FROM {table}"), "p"), known["dense"])
    best = spark.sql(f"SELECT id FROM {table} WHERE dense_of(x)[0] > 0.5 ORDER BY id")
    assert [row.id for row in best.collect()] == [i for i in range(50) if known["dense"][i, 0] > 0.5]
    assert close(column(spark.table(table).select("id", again("x").alias("p")), "p"), known["dense"])


def test_several_numeric_arguments_form_one_input(spark, table, kinds, known):
    register_udf(spark, "dense_of", kinds / "dense")
    found = spark.sql(f"SELECT id, dense_of(x[0], x[1], x[2], x[3]) AS p FROM {table}")
    assert close(column(found, "p"), known["dense"])


def test_inputs_are_arguments_and_outputs_are_a_struct(spark, table, kinds, known):
    register_udf(spark, "pair_of", kinds / "pair.keras")
    found = spark.sql(f"SELECT id, pair_of(x, b).far AS f, pair_of(x, b).near AS n FROM {table}")
    assert found.dtypes[1:] == [("f", "array<float>"), ("n", "float")]
    assert close(column(found, "f"), known["far"])
    assert close(column(found, "n"), known["near"][:, 0])


def test_a_null_gives_null_unless_another_policy_is_set(spark, table, kinds, known):
    query = f"SELECT id, totals(if(id = 3, null, x)) AS t FROM {table}"
    register_udf(spark, "totals", kinds / "only", outputs=["total"])
    expected = known["x"].sum(1) * 3
    found = {row.id: row.t for row in spark.sql(query).collect()}
    assert found.pop(3) is None
    assert close([found[i] for i in sorted(found)], [expected[i] for i in sorted(found)])
    register_udf(spark, "totals", kinds / "only", outputs=["total"], nulls="fill")
    assert {row.id: row.t for row in spark.sql(query).collect()}[3] == 0
    register_udf(spark, "totals", kinds / "only", outputs=["total"], nulls="fail")
    with pytest.raises(Exception, match=r"column 'argument 1' has a null \(row \d+ of partition \d+\)"):
        spark.sql(query).collect()


def test_unsuitable_arguments_are_refused(spark, table, kinds):
    register_udf(spark, "dense_of", kinds / "dense")
    register_udf(spark, "pair_of", kinds / "pair.keras")
    with pytest.raises(Exception, match=r"column 'argument 1' is string, and does not fit x \(float32 4\): cast it"):
        spark.sql(f"SELECT /*+ COALESCE(1) */ dense_of('x') FROM {table}").collect()
    with pytest.raises(Exception, match=r"has a list of 3 values, \[.*, where the model takes 4 \(row 0 of"):
        spark.table(table).coalesce(1).select(F.call_udf("dense_of", F.slice("x", 1, 3))).collect()
    with pytest.raises(
        Exception, match=r"the model takes 2 arguments, left \(float32 4\), right .*, got 1; give one for each"
    ):
        spark.sql(f"SELECT /*+ COALESCE(1) */ pair_of(x) FROM {table}").collect()
    with pytest.raises(PlanError, match="name must have only letters"):
        register_udf(spark, "a b", kinds / "dense")
