"""Marks of tests that need certain versions."""

from __future__ import annotations

import pyspark
import pytest

SPARK = tuple(int(part) for part in pyspark.__version__.split(".")[:2])

data_sources = pytest.mark.skipif(SPARK < (4, 0), reason="Spark has data sources in Python from 4.0 on")
arrow_udfs = pytest.mark.skipif(
    SPARK < (4, 1), reason="Spark has Arrow UDFs from 4.1 on; before, all columns go to Python"
)
sparse_vectors = pytest.mark.skipif(SPARK < (4, 0), reason="before Spark 4 vectors travel as arrays")
profiles = pytest.mark.skipif(SPARK < (4, 0), reason="DataFrames take resource profiles from Spark 4.0 on")
connect_client = pytest.mark.skipif(SPARK < (4, 0), reason="tfos_nb runs over Spark Connect from 4.0 on")
