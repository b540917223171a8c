"""``--validation`` on the lines of the magics."""

from __future__ import annotations

import pytest

from tfos_nb.errors import PlanError
from tfos_nb.magics.arguments import is_data
from tfos_nb.magics.options import parse_options
from tfos_nb.magics.parsers import TRAIN


def test_the_variable_of_the_validation_rows_is_parsed() -> None:
    assert parse_options("mnist --data df --validation held_out").validation == "held_out"
    assert TRAIN.understand("df --validation held_out").validation == "held_out"


def test_validation_rows_without_training_rows_are_refused() -> None:
    with pytest.raises(PlanError, match="--validation held_out needs --data, and no --data is given"):
        parse_options("mnist --validation held_out")


def test_the_result_of_writestream_is_data() -> None:
    from pyspark.sql.streaming import DataStreamWriter

    assert is_data(DataStreamWriter.__new__(DataStreamWriter))
    assert not is_data(DataStreamWriter)
