"""Memory shared by the ranks of one Linux machine."""

from __future__ import annotations

import mmap
import os
import sys

from lightning.fabric import Fabric

from fedbench.engine.collective import collective


def can_share_memory(fabric: Fabric) -> bool:
    on_cpu = fabric.device.type == "cpu" and sys.platform == "linux"
    return on_cpu and fabric.world_size > 1


class SharedMemory:
    """Zero-initialized bytes that rank 0 creates and every rank maps. A collective call."""

    def __init__(self, fabric: Fabric, n_bytes: int) -> None:
        path = ""
        if fabric.global_rank == 0:
            # An anonymous file instead of /dev/shm, which containers keep small.
            self.file = os.memfd_create("fedbench")
            os.truncate(self.file, n_bytes)
            path = f"/proc/{os.getpid()}/fd/{self.file}"
        with collective():
            path = fabric.broadcast(path)
        if fabric.global_rank > 0:
            self.file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.buffer = mmap.mmap(self.file, n_bytes)
