"""Folders that a command needs while it runs. What a killed one leaves, the next one removes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

VARIABLES = ("TMPDIR", "JOBLIB_TEMP_FOLDER")  # name the folder for temporary files
LOCK_FILE = ".lock"  # held while the folder is in use; the system releases it if the process dies


class ScratchFolder:
    """A new folder in `parent`, and a lock that tells other commands that it is in use."""

    def __init__(self, parent: Path, prefix: str) -> None:
        for old in parent.glob(f"{prefix}*"):
            _remove_unused(old)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            self._lock = FileLock(self.path / LOCK_FILE)
            self._lock.acquire()
            if (self.path / LOCK_FILE).exists():  # else another one removed the unlocked folder
                return
            self._lock.release()

    def remove(self) -> None:
        """Remove the folder with all that it contains."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def temporary_files_inside() -> ScratchFolder:
    """Let this process, and those that it starts, put their temporary files into a new folder.

    Killed processes leave files there, and so do many libraries.
    """
    folder = ScratchFolder(Path(tempfile.gettempdir()), "fedtmp-")
    tempfile.tempdir = str(folder.path)
    os.environ |= dict.fromkeys(VARIABLES, tempfile.tempdir)
    return folder


@contextmanager
def temporary_files_removed() -> Iterator[None]:
    """Remove the temporary files of this process, and of those that it starts, at the end."""
    default, given = tempfile.tempdir, {name: os.environ.get(name) for name in VARIABLES}
    folder = temporary_files_inside()
    try:
        yield
    finally:
        tempfile.tempdir = default
        for name, value in given.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        folder.remove()


def _remove_unused(folder: Path) -> None:
    if not (folder / LOCK_FILE).exists():  # not such a folder, whatever its name
        return
    lock = FileLock(folder / LOCK_FILE)
    with suppress(Timeout, OSError), lock.acquire(blocking=False):  # of another sweep, another user
        shutil.rmtree(folder, ignore_errors=True)
