"""Take over a run that has finished under another name: copy its files."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from fedbench.config import RunConfig
from fedbench.errors import UserError
from fedbench.results.atomic_files import remove, remove_partial_files, write_atomically
from fedbench.results.continuation import copy_first
from fedbench.results.origin import Origin
from fedbench.results.run_dir import RunDir
from fedbench.results.sealed import damage_told, require_intact

REMEDY = "the run is computed"
FIGURES = "*.png"


def take_over(
    folder: RunDir, sources: Iterable[RunDir], config: RunConfig, origin: Origin | None
) -> list[str]:
    """Copy the first of the finished `sources` that is intact, unless `folder` has finished.

    Return lines that say which, and why others cannot be taken over. Call this with the lock of
    `folder`. A kill leaves an unfinished run, which can be taken over again or resumed.
    """
    if folder.finished() is not None:
        return []

    def copy(source: RunDir) -> str:
        _copy(source, folder, config, origin)
        return f"taken over from {source.path.parent}"

    return copy_first("take over", sources, copy)


def _copy(source: RunDir, target: RunDir, config: RunConfig, origin: Origin | None) -> None:
    """Copy everything but config.yaml and origin.json, which name the folder and the command."""
    if source.finished() is None:  # changed before the lock was held
        raise UserError(f"it is no longer finished; {REMEDY}")
    remove_partial_files(target.path)
    target.start(config, origin)
    # The order matters after a kill: a checkpoint without its rounds could not be resumed.
    _copy_file(source.rounds_file.path, target.rounds_file.path)
    if source.checkpoint_file.exists():
        _copy_file(source.checkpoint_file, target.checkpoint_file, target.id)
    else:
        remove(target.checkpoint_file)
    for figure in source.path.glob(FIGURES):
        _copy_file(figure, target.path / figure.name)
    remove(target.traceback_file)
    _copy_file(source.summary_file, target.summary_file)  # last: from now on the run has finished


def _copy_file(source: Path, target: Path, run: str | None = None) -> None:
    """Copy a file atomically; with `run`, only if it is intact and of this run."""
    with damage_told(source, REMEDY), source.open("rb") as content:

        def write(file: BinaryIO) -> None:
            shutil.copyfileobj(content, file)
            if run is not None:
                file.flush()
                require_intact(Path(file.name), run)

        write_atomically(target, write)
