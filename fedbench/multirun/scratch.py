"""Folders that a sweep needs while it runs. What a killed sweep leaves, the next one removes."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

LOCK_FILE = ".lock"  # held while the folder is in use; the system releases it if the process dies


class ScratchFolder:
    """A new folder in `parent`, and a lock that tells other sweeps that it is in use."""

    def __init__(self, parent: Path, prefix: str) -> None:
        for old in parent.glob(f"{prefix}*"):
            _remove_unused(old)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            self._lock = FileLock(self.path / LOCK_FILE)
            self._lock.acquire()
            if (self.path / LOCK_FILE).exists():  # else another sweep removed the unlocked folder
                return
            self._lock.release()

    def remove(self) -> None:
        """Remove the folder with all that it contains."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def _remove_unused(folder: Path) -> None:
    if not (folder / LOCK_FILE).exists():  # not such a folder, whatever its name
        return
    lock = FileLock(folder / LOCK_FILE)
    with suppress(Timeout, OSError), lock.acquire(blocking=False):  # of another sweep, another user
        shutil.rmtree(folder, ignore_errors=True)
