"""A client of Spark Connect that launches a detached cluster and is killed; ``connect_detach.py URL FOLDER WHERE``."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import tfos_nb

ZONE = "Asia/Kathmandu"


def count_rows(args: Any, ctx: Any) -> int:
    """Return the number of rows; wait for the end's file before."""
    found = sum(len(batch["id"]) for batch in ctx.dataset(64, columns=["id"]))
    print("waits for the end", flush=True)
    while not os.path.exists(args["end"]):
        threading.Event().wait(0.05)
    return found


def rows(spark: Any) -> Any:
    """Read the rows, in the session of the detached process."""
    assert spark.conf.get("spark.sql.session.timeZone") == ZONE
    return spark.range(0, 1000, 1, 2)


def main() -> None:
    """Launch, and leave a file that says so."""
    spark = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
    spark.conf.set("spark.sql.session.timeZone", ZONE)
    folder = Path(sys.argv[2])
    args = {"end": str(folder / "end")}
    where: bool | str = sys.argv[3] if len(sys.argv) > 3 else True
    options: dict[str, Any] = {"workers": 2, "spark": spark, "name": "far", "record": False}
    cluster = tfos_nb.launch(count_rows, args, detach=where, data=rows, **options)
    (folder / "id").write_text(cluster.id)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
