"""Nodes on the driver's own host: parameter servers that use no Spark slot.

The supervisor is the same as in a Spark task, and connects to the same door. A thread of the driver waits for it,
instead of a task.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
from dataclasses import dataclass

import grpc

from tfos_nb.runtime.control.door import DoorClient
from tfos_nb.runtime.control.lifecycle import NodeJob
from tfos_nb.runtime.control.processes import kill_group, python_path, start_module, write_frame
from tfos_nb.runtime.node.spark_task import HoldsSlot, NodeTask, SlotUse, SupervisorEnded, slot_use

__all__ = ["HostedNode"]

_ASK_SECONDS = 5.0
_COMPLAINTS = 8000  # bytes of a supervisor's output that are reported


@dataclass(frozen=True)
class HostedNode:
    """Run one node on this host until it ends.

    Parameters
    ----------
    task : NodeTask
        The task that would be sent to Spark.
    node : str
        The node's name.
    """

    task: NodeTask
    node: str

    def __call__(self) -> None:
        """Start its supervisor and wait for it; replace one that hangs."""
        while self._hangs():
            pass

    def _hangs(self) -> bool:
        """Run one supervisor to its end; return whether it was killed here because it hung, and must be replaced."""
        with tempfile.TemporaryFile() as complaints:
            supervisor = start_module(
                "tfos_nb.runtime.node.supervisor",
                env={**os.environ, "PYTHONPATH": os.pathsep.join(python_path())},
                stdin=subprocess.PIPE,
                stderr=complaints.fileno(),
            )
            assert supervisor.stdin is not None, "stdin was set to a pipe"
            try:
                with contextlib.suppress(BrokenPipeError):  # it is dead: its exit code and its output say why
                    write_frame(supervisor.stdin, self._job())
                hangs = self._wait(supervisor)
            finally:
                kill_group(supervisor)
                supervisor.stdin.close()
            code = supervisor.wait()
            if code != 0:
                complaints.seek(0)
                self._tell(code, complaints.read()[-_COMPLAINTS:].decode(errors="replace"), supervisor.pid)
            return hangs

    def _wait(self, supervisor: subprocess.Popen[bytes]) -> bool:
        """Wait until it has ended, or the driver has dropped it because it hangs; return whether it was dropped."""
        question = HoldsSlot(self.node, supervisor.pid, socket.gethostname())
        with DoorClient(self.task.door) as door:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    supervisor.wait(_ASK_SECONDS)
                    return False
                if slot_use(question, door) is SlotUse.END:
                    return True

    def _job(self) -> NodeJob:
        task = self.task
        return NodeJob(
            node=self.node,
            cluster=task.cluster,
            attempt=0,
            executor="driver",
            door_host=task.door.host,
            door_port=task.door.port,
            host=task.door.host,  # the executors know this host by it; this host's own name may resolve to loopback
            env=task.env,
            python_path=task.python_path,
            settings={**task.settings, "fed": self.node in task.fed},
            certificate=task.door.certificate,
            token=task.door.token,
            payload=task.payload,
        )

    def _tell(self, code: int, text: str, pid: int) -> None:
        with DoorClient(self.task.door) as door, contextlib.suppress(grpc.RpcError):  # the cluster may be over
            door.ask(SupervisorEnded(self.node, code, text, pid, socket.gethostname()))
