"""The modules of TensorFlowOnSpark that other modules of this package will take over: the one place to wire them up.

For each name, the module and the name there that answer it; an empty module for one that is not there yet.
"""

from __future__ import annotations

import importlib
from typing import Any

from tfos_nb.errors import PlanError

__all__ = ["DFUTIL", "PIPELINE", "resolve"]

DFUTIL = {
    name: ("", name)
    for name in (
        "fromTFExample",
        "infer_schema",
        "isLoadedDF",
        "loadTFRecords",
        "loadedDF",
        "saveAsTFRecords",
        "toTFExample",
    )
}
PIPELINE = {
    name: ("", name)
    for name in (
        "HasBatchSize",
        "HasClusterSize",
        "HasEpochs",
        "HasExportDir",
        "HasGraceSecs",
        "HasInputMapping",
        "HasInputMode",
        "HasMasterNode",
        "HasModelDir",
        "HasNumPS",
        "HasOutputMapping",
        "HasProtocol",
        "HasReaders",
        "HasSignatureDefKey",
        "HasSteps",
        "HasTFRecordDir",
        "HasTagSet",
        "HasTensorboard",
        "Namespace",
        "TFEstimator",
        "TFModel",
        "TFParams",
        "TFTypeConverters",
        "get_meta_graph_def",
        "single_node_env",
        "yield_batch",
    )
}


def resolve(table: dict[str, tuple[str, str]], name: str, owner: str) -> Any:
    """Return what a name stands for.

    Raises
    ------
    PlanError
        If nothing answers it yet.
    AttributeError
        If TensorFlowOnSpark has no such name.
    """
    if name not in table:
        raise AttributeError(f"module {owner!r} has no attribute {name!r}")
    module, there = table[name]
    if not module:
        raise PlanError(f"{owner}.{name} is not there yet in this version of tfos_nb: see docs/migrating.md")
    return getattr(importlib.import_module(module), there)
