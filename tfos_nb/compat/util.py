"""``util``: helper functions for a host, under TensorFlowOnSpark's names."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from typing import Any

from tfos_nb.compat import gpu_info

__all__ = ["find_in_path", "get_ip_address", "read_executor_id", "single_node_env", "write_executor_id"]


def single_node_env(num_gpus: int = 1, worker_index: int = -1, nodes: Sequence[Any] = ()) -> None:
    """Let TensorFlow in this process use at most ``num_gpus`` unused GPUs, and no cluster.

    ``nodes`` has the hosts of all workers. From it follows the caller's index among the workers on its own host, by
    which these get different GPUs.
    """
    os.environ.pop("TF_CONFIG", None)
    if num_gpus > 0 and gpu_info.is_gpu_available():
        index = worker_index
        if index >= 0 and nodes:
            index = [place for place, host in enumerate(nodes) if host == nodes[worker_index]].index(worker_index)
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu_info.get_gpus(num_gpus, index))
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def get_ip_address() -> str:
    """Return the address of this host from which packets to other hosts would be sent. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("8.8.8.8", 80))
            return str(probe.getsockname()[0])
        except OSError as error:
            if error.errno != errno.ENETUNREACH:
                raise
            return socket.gethostbyname(socket.getfqdn())


def find_in_path(path: str, file: str) -> str | bool:
    """Return the first file named ``file`` in a list of directories such as ``PATH``; False if there is none."""
    for folder in path.split(os.pathsep):
        candidate = os.path.join(folder, file)
        if os.path.isfile(candidate):
            return candidate
    return False


def write_executor_id(num: int) -> None:
    """Write a number to the file ``executor_id`` in the working directory."""
    with open("executor_id", "w", encoding="ascii") as file:
        file.write(str(num))


def read_executor_id() -> int:
    """Return the number in the file ``executor_id`` in the working directory."""
    with open("executor_id", encoding="ascii") as file:
        return int(file.read())
