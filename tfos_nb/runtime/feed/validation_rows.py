"""A node's share of the validation rows, which it has on disk for as long as it lives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.feed.batching import Pass
from tfos_nb.runtime.feed.ledger import FeedSchema
from tfos_nb.runtime.feed.supply import Supply

__all__ = ["Kept"]


@dataclass(frozen=True)
class Kept:
    """The validation rows of a node's share: as often as they are asked for.

    Which ones: those that were given to the call of ``train`` whose rows the node is going through.
    """

    supply: Supply

    def schema(self) -> FeedSchema | None:
        """Wait until the driver has said what is fed; None if nothing will be.

        Raises
        ------
        FeedFailed
            If no validation rows were given.
        """
        supply = self.supply
        with supply._changed:
            supply._changed.wait_for(lambda: supply._latest is not None or supply._kept_schemas or supply._closed)
            if supply._latest is None:  # they come before the first call's training rows
                return next(iter(supply._kept_schemas.values()), None)
            return supply._kept_schemas[self._feed()]

    def next_pass(self) -> Pass | None:
        """Return all rows of the share once more."""
        supply = self.supply
        with supply._changed:
            if supply._latest is None or supply._stopped:
                return None
            intake = supply._intakes[self._feed()]
        assert intake.ended is not None, "the driver feeds validation rows before all others"
        if intake.spill is None or not intake.spill.whole or intake.rows_in != intake.ended.rows:
            raise FeedFailed(f"{intake.rows_in} validation rows came, and not all of them could be kept on disk")
        return Pass(self._replay(intake.spill.batches()), intake.shares)

    def _feed(self) -> int:
        begins = self.supply._current or self.supply._latest
        if begins is None or not begins.validation:
            raise FeedFailed(
                "no validation rows were given: cluster.train(df, validation=df2), or --validation VAR in the cell"
            )
        return begins.validation

    def _replay(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        self.supply._validating += 1
        try:
            yield from batches
        finally:
            self.supply._validating -= 1
