"""How much memory there is, and errors for what does not fit into it."""

from __future__ import annotations

import os
from pathlib import Path

from fedbench.errors import UserError

# The limit and the use of the control group that a container or a Slurm job runs in
CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def available() -> float:
    """Bytes of memory that this process can still get; infinity if the system does not say."""
    return max(min(_of_machine(), *(_of_group(*files) for files in CGROUPS)), 0)


def check_memory(what: str, n_bytes: float) -> None:
    """Raise a UserError if `what` needs more memory than there is."""
    if n_bytes > (free := available()):
        raise UserError(f"{what}: needs about {size(n_bytes)} of memory, {size(free)} are free")


def size(n_bytes: float) -> str:
    """Write a number of bytes: `37 GB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:,.3g} TB" if n_bytes < 1000 else f"{n_bytes:,.0f} TB"


def _of_machine() -> float:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kilobytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
        return int(kilobytes) * 1024
    except (OSError, StopIteration):  # not Linux
        names = getattr(os, "sysconf_names", {})
        if not {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= names.keys():
            return float("inf")
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_group(limit: str, used: str) -> float:
    try:
        return int(Path(limit).read_text()) - int(Path(used).read_text())
    except (OSError, ValueError):  # no such group, or its limit is `max`
        return float("inf")
