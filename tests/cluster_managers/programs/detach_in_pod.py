"""Launch a detached cluster in a pod and be killed, or attach to it. ``detach_in_pod.py launch|attach FOLDER``."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import tfos_nb


def count_rows(args: Any, ctx: Any) -> int:
    """Return the number of rows; wait for the end's file before."""
    found = sum(len(batch["id"]) for batch in ctx.dataset(64, columns=["id"]))
    while not os.path.exists(args["end"]):
        threading.Event().wait(0.1)
    return found


def rows(spark: Any) -> Any:
    """Make the rows, in the session of the detached process."""
    return spark.range(0, 1000, 1, 2)


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    if sys.argv[1] == "launch":
        given = {"end": str(folder / "end")}
        cluster = tfos_nb.launch(count_rows, given, workers=2, detach=True, data=rows, name="inpod", record=False)
        (folder / "id").write_text(cluster.id)
        os.kill(os.getpid(), signal.SIGKILL)
    attached = tfos_nb.attach("inpod")
    (folder / "end").touch()
    print(json.dumps({"outcome": {"id": attached.id, "results": attached.results()}}), flush=True)
