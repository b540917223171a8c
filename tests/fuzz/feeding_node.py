"""A node's Flight server in a process of its own: ``python -m tests.fuzz.feeding_node DIRECTORY TOKEN``.

It prints its address, and for each line of its input what it has received.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.feed import row_queue as queue_module
from tfos_nb.runtime.feed.messages import FeedBegins
from tfos_nb.runtime.feed.row_queue import RowQueue
from tfos_nb.runtime.feed.transfer import FeedServer
from tfos_nb.runtime.inference.serving import RequestExchange
from tfos_nb.runtime.rows.columns import arrays_of, columns_of, first_lengths

BUFFER = 400 * (16 << 20)  # enough blocks for senders that never return theirs; only used ones take memory


def say(words: Any) -> None:
    print(json.dumps(words), flush=True)


def main() -> None:
    """Serve until the input ends."""
    directory, token = sys.argv[1:]
    queue_module.ANNOUNCED_WITHIN = 0.05
    passes = RowQueue("worker:0", directory, BUFFER, 1 << 20, lambda told: None)
    server = FeedServer(passes, directory=directory, host="127.0.0.1", token=token)
    server.answer_with(RequestExchange("worker:0", ["input"], 1 << 20).exchange)
    passes.begin(FeedBegins(1, 1, False))
    place = server.place
    say({"socket": place.socket, "port": place.port, "certificate": place.certificate.decode()})
    rows = passes.feed_rows(1)
    for _ in sys.stdin:
        ids: list[int] = []
        while rows.queued_bytes or rows._queue:
            batch = rows._take()
            assert batch is not None
            try:
                arrays = arrays_of(batch, columns_of(batch.schema, first_lengths(batch)).values())
            except FeedFailed:  # lists of other lengths: the reader's error, which names the column
                continue
            ids += [int(one) for one in arrays.get("id", ())]
        results = sum(thread.name == "tfos_nb results" for thread in threading.enumerate())
        say({"rows": rows.rows_in, "ids": ids, "results_threads": results})
    passes.stop()
    server.close()


if __name__ == "__main__":
    main()
