"""Checks of what a program asks of the feed."""

from __future__ import annotations

import pytest

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.control.plan import InputMode
from tfos_nb.runtime.feed.messages import check_fed


def test_a_node_that_gets_no_rows_is_told_why_and_what_to_do() -> None:
    check_fed("ctx.dataset", "worker:0", True, InputMode.SPARK)
    with pytest.raises(FeedFailed, match=r"^ctx\.dataset: ps:0 gets no rows from Spark: it is a parameter server, .*"):
        check_fed("ctx.dataset", "ps:0", False, InputMode.SPARK)
    with pytest.raises(FeedFailed, match=r"^ctx\.batches: worker:0 .*input_mode='tensorflow': .*ctx\.read\(…\), or"):
        check_fed("ctx.batches", "worker:0", False, InputMode.TENSORFLOW)
