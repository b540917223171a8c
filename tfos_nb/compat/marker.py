"""``marker``: classes that TensorFlowOnSpark puts between rows. They are not used here; only the names are kept."""

from __future__ import annotations

__all__ = ["EndPartition", "Marker"]


class Marker:
    """A marker between rows."""


class EndPartition(Marker):
    """The marker of the end of a partition."""
