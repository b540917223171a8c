"""Between-graph training of TensorFlow 1: variables on the ps; each worker builds the graph and trains in a session.

``tf.compat.v1.train.MonitoredTrainingSession`` does this, but has problems in a cluster that starts and ends
automatically. This module solves them:

- A worker that starts before the chief has initialised the variables checks again only after 30 seconds. Here it checks
  every second.
- Under SyncReplicasOptimizer a worker waits for a token, which comes with each update. After the other workers have
  ended no updates are made, and the last worker waits forever. Here each worker leaves tokens when it ends, so the
  others can continue alone.
- The chief makes the updates. If it ends first, it closes the queue of tokens, and the others lose the rest of their
  rows. Here it ends last.
- The chief's thread that makes the updates waits for gradients even at the end, and TensorFlow's session waits two
  minutes for that thread. Here the session waits 5 seconds.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

__all__ = ["monitored_session"]

logger = logging.getLogger(__name__)

_LOOK_EVERY = 1  # seconds
_LOOK_OFTEN = 0.1  # seconds
_OTHERS_STAND_STILL = 120.0  # seconds without an update after which the chief stops waiting for the other workers
_CHIEF_WITHIN = 600  # seconds
_THREADS_END_WITHIN = 5  # seconds


def monitored_session(
    server: Any,
    *,
    is_chief: bool,
    optimizer: Any = None,
    workers: int = 1,
    hooks: Sequence[Any] = (),
    checkpoint_dir: str | None = None,
    save_checkpoint_secs: float | None = None,
    config: Any = None,
) -> Any:
    """Return a session in which this worker trains, inside the graph that it has built.

    Parameters
    ----------
    server : tf.distribute.Server
        From ``ctx.server()``.
    is_chief : bool
        Whether this worker initialises the variables and writes checkpoints.
    optimizer : tf.compat.v1.train.SyncReplicasOptimizer, optional
        The optimizer, if training is synchronous. Its ``apply_gradients`` must have been called.
    workers : int, optional
        Number of workers, for ``optimizer``. Each of them must train in such a session.
    hooks : sequence of tf.compat.v1.train.SessionRunHook, optional
        Hooks of the session, such as ``StopAtStepHook``.
    checkpoint_dir : str, optional
        Directory where the chief writes checkpoints. It starts from the newest one there.
    save_checkpoint_secs : float, optional
        Seconds between two checkpoints. Default: 600.
    config : tf.compat.v1.ConfigProto, optional
        Configuration of the session.

    Returns
    -------
    tf.compat.v1.train.MonitoredSession
        The session.
    """
    import tensorflow as tf

    train = tf.compat.v1.train
    hooks = list(hooks)
    if optimizer is not None:
        hooks += [optimizer.make_session_run_hook(is_chief, num_tokens=0), _at_the_end(optimizer, workers, is_chief)]
    scaffold = train.Scaffold()
    if not is_chief:
        creator = _patient_creator(scaffold, server.target, config)
        return train.MonitoredSession(creator, hooks, stop_grace_period_secs=_THREADS_END_WITHIN)
    if checkpoint_dir:
        hooks.append(
            train.CheckpointSaverHook(checkpoint_dir, save_secs=save_checkpoint_secs or 600, scaffold=scaffold)
        )
    creator = train.ChiefSessionCreator(scaffold, server.target, config, checkpoint_dir)
    return train.MonitoredSession(creator, hooks, stop_grace_period_secs=_THREADS_END_WITHIN)


def _patient_creator(scaffold: Any, target: str, config: Any) -> Any:
    """Return a session creator for MonitoredSession. The class is defined here because TensorFlow is imported late."""
    import tensorflow as tf

    train = tf.compat.v1.train

    class WaitingSessionCreator(tf.compat.v1.train.SessionCreator):  # type: ignore[misc]
        """Session creator that waits for the chief, and checks every second."""

        def create_session(self) -> Any:
            """Wait until the variables are initialised, and return the session."""
            scaffold.finalize()
            manager = train.SessionManager(
                local_init_op=scaffold.local_init_op,
                ready_op=scaffold.ready_op,
                ready_for_local_init_op=scaffold.ready_for_local_init_op,
                recovery_wait_secs=_LOOK_EVERY,
            )
            return manager.wait_for_session(target, config=config, max_wait_secs=_CHIEF_WITHIN)

    return WaitingSessionCreator()


def _at_the_end(optimizer: Any, workers: int, is_chief: bool) -> Any:
    """Return the hook by which an ending worker lets the others continue and the chief waits for the others."""
    import tensorflow as tf

    class AtTheEnd(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
        """Hook that leaves one token for each worker, and counts the workers that have ended."""

        def begin(self) -> None:
            """Build the operations, while the graph can still be changed."""
            self._step = tf.compat.v1.train.get_global_step()
            self._leave = optimizer.get_init_tokens_op(workers)
            with tf.device(self._step.device):
                ended = tf.queue.FIFOQueue(workers, [tf.int32], [()], shared_name="tfos_nb_ended")
                self._tell, self._ended = ended.enqueue(1), ended.size()

        def end(self, session: Any) -> None:
            """Leave tokens. The chief also stays until the others have ended, and makes their updates."""
            with contextlib.suppress(tf.errors.CancelledError):  # the chief has ended already
                session.run(self._leave)
            if not is_chief:
                session.run(self._tell)
                return
            reached, since = -1, time.monotonic()
            while (seen := session.run([self._ended, self._step]))[0] < workers - 1:
                if seen[1] != reached:
                    reached, since = seen[1], time.monotonic()
                elif time.monotonic() - since > _OTHERS_STAND_STILL:
                    logger.warning("%d of %d other workers have not ended", workers - 1 - seen[0], workers - 1)
                    return
                threading.Event().wait(_LOOK_OFTEN)  # a queue on the ps cannot wake this thread

    return AtTheEnd()
