"""``marker``: what TensorFlowOnSpark puts between rows. Nothing is put there here; the names are kept."""

from __future__ import annotations

__all__ = ["EndPartition", "Marker"]


class Marker:
    """A sign between rows."""


class EndPartition(Marker):
    """The end of a partition."""
