"""Continue a run with more rounds: take over the rounds of the same run with fewer."""

from __future__ import annotations

from collections.abc import Iterable

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
    lines: list[str] = []
    if folder.checkpoint_file.exists():
        return lines
    for source in shorter:
        try:
            with source.locked(wait=False):
                if not source.rounds():
                    continue
                n_rounds = _copy(source, folder, config)
        except Timeout:
            lines.append(f"cannot continue {source.path.name}, which is still running")
        except WriteError:
            raise
        except UserError as error:
            lines.append(f"cannot continue {source.path.name}: {error}")
        else:
            return [*lines, f"continues {source.path.name} after its {n_rounds} rounds"]
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
