"""A program whose TensorBoard is looked at while it runs and afterwards. ``show_tensorboard.py LOGS FOLDER``.

It writes the cluster's id to FOLDER/cluster, and ends once FOLDER/end exists.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.waiting import until
from tfos_nb import launch, spark_session
from tfos_nb.jupyter.endpoint import Endpoint


def write_until_stopped(args: Any, ctx: Any) -> str:
    """Write numbers, one after the other, until the user stops it."""
    import threading

    import tensorflow as tf

    step = 0
    writer = tf.summary.create_file_writer(f"{ctx.log_dir}/mine")
    with writer.as_default():
        while not ctx.should_stop:
            if ctx.is_chief:
                tf.summary.scalar("speed", 2.0 * step, step=step)
                writer.flush()
            step += 1
            ctx.report(step=step)
            threading.Event().wait(0.5)
    return str(ctx.log_dir)


if __name__ == "__main__":
    logs, folder = sys.argv[1], Path(sys.argv[2])
    endpoint = Endpoint()
    cluster = launch(
        write_until_stopped, spark=spark_session(), workers=2, input_mode="tensorflow", name="board", log_dir=logs
    )
    endpoint.serve(cluster)
    (folder / "part").write_text(cluster.id)
    (folder / "part").rename(folder / "cluster")
    cluster.results()
    until((folder / "end").exists, 120)
    cluster.close()
    endpoint.close()
