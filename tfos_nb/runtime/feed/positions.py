"""Record which rows of a pass a saved state includes, if it was saved in the middle of the pass.

::

    node:    ctx.checkpoint(model, epoch=2, rows=640) ── PositionHeld(state, {partition: row}) ──▶ driver: HeldPositions
    driver:  Start(held=states) ──▶ node: ctx.resume(model) ── FeedFrom(passes=2, state) ──▶ the pass without these rows

A node's rows of a partition come in order, so one number for each partition says which ones it has finished. If it
shuffles them, it also says which rows before that number it has not. The driver's ledger
(:mod:`tfos_nb.runtime.feed.messages`) says which rows of the partition belong to the node. If a node was lost before it
reported its position, that state is not used.

A number means the same rows only if Spark reads the partition the same way again. So it comes with a fingerprint
(:mod:`tfos_nb.runtime.rows.fingerprint`), which the task compares when it reads the partition again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tfos_nb.runtime.control.wire import message
from tfos_nb.runtime.feed.messages import HeldRows, PassPosition, Reached

__all__ = ["PositionHeld", "RowsOfState"]


@message
@dataclass(frozen=True)
class PositionHeld:
    """From a node: which of its rows of a pass a state includes: in each partition, those before a row.

    Those in ``left`` are not included. ``known`` has a fingerprint of the rows before that row, and of those that came
    in one batch with the last of them. ``waits``: the state itself is saved, and this node runs no further step.
    ``stored``: this node writes it to the ``model_dir``, so training may continue from it much later. ``at`` says how
    to begin the pass once more behind these rows, if they are whole batches. ``adds``: they are only the rows that are
    not in the state from which this generation has continued.
    """

    node: str
    feed: int
    state: str
    reached: dict[int, int]
    known: dict[int, Reached] = field(default_factory=dict)
    left: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    waits: bool = False
    stored: bool = False
    at: PassPosition | None = None
    adds: bool = False


@message
@dataclass(frozen=True)
class RowsOfState:
    """To the node that has written a state to the ``model_dir``: which rows of its pass the state includes."""

    state: str
    rows: HeldRows
