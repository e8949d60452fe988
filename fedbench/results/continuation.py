"""Continue a run with more rounds: take over the rounds of the same run with fewer."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from filelock import Timeout

from fedbench.config import RunConfig
from fedbench.errors import UserError
from fedbench.results.atomic_files import WriteError
from fedbench.results.round_record import without_accuracies
from fedbench.results.run_dir import RunDir


def continue_shorter(folder: RunDir, shorter: Iterable[RunDir], config: RunConfig) -> list[str]:
    """Copy the rounds of the first of the `shorter` runs that allows it, unless `folder` has some.

    Return lines that say which, and why others cannot be continued.
    """
    if folder.checkpoint_file.exists():
        return []

    def copy(source: RunDir) -> str | None:
        if not source.rounds():
            return None
        return f"continues {source.path.name} after its {_copy(source, folder, config)} rounds"

    return copy_first("continue", shorter, copy)


def copy_first(
    verb: str, sources: Iterable[RunDir], copy: Callable[[RunDir], str | None]
) -> list[str]:
    """Call `copy` with one source after the other until it returns a line.

    No other process runs the source meanwhile. Return the line, and those that say why earlier
    sources could not be used.
    """
    lines: list[str] = []
    for source in sources:
        try:
            with source.locked(wait=False):
                line = copy(source)
        except Timeout:
            lines.append(f"cannot {verb} {source.path}, which is still running")
        except WriteError:
            raise
        except UserError as error:
            lines.append(f"cannot {verb} {source.path}: {error}")
        else:
            if line is not None:
                return [*lines, line]
    return lines


def _copy(source: RunDir, target: RunDir, config: RunConfig) -> int:
    """Copy checkpoint.pt and the rounds before it, as those of `target`; return their number."""
    if not source.checkpoint_file.exists():
        raise UserError(f"it has no {source.checkpoint_file.name}")
    checkpoint = source.load_checkpoint(torch.device("cpu"))
    n_rounds = checkpoint.next_round
    records = source.rounds()[:n_rounds]
    if len(records) < n_rounds:
        raise UserError(f"its checkpoint is of round {n_rounds}, its last record {len(records)}")
    if not config.evaluated_in(n_rounds - 1):  # but it was the last round of the shorter run
        records[-1] = without_accuracies(records[-1])
    target.rounds_file.write(records)
    target.checkpoint(checkpoint)
    return n_rounds
