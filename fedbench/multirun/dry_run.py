"""`--dry-run`: what a command would run, what is done, and how long the rest takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from omegaconf import DictConfig
from rich.text import Text

from fedbench import pretraining
from fedbench.display.console import console_for_output, print_text
from fedbench.display.sweep_panel import about
from fedbench.multirun.launchers import n_at_a_time
from fedbench.plan import Plan
from fedbench.results.checkpoint import next_round_of
from fedbench.results.paces import Pace, read_paces
from fedbench.results.provenance import has_changed_since
from fedbench.results.run_dir import Record, RunDir
from fedbench.results.sealed import DamageError, unseal_json
from fedbench.results.settings import flat

FINISHED, REUSED, TO_RESUME, TO_RUN = "finished", "reused", "to resume", "to run"
UNKNOWN = "no finished run to estimate from"


@dataclass(frozen=True)
class Forecast:
    """What the command would do about a run."""

    plan: Plan
    kind: str
    text: str  # for the user
    rounds_left: int = 0
    pace: Pace | None = None  # None if no finished run is comparable, or no round is left

    @property
    def is_done(self) -> bool:
        return self.kind in (FINISHED, REUSED)

    @property
    def seconds(self) -> float | None:
        """Estimated time of the rounds left, without pretraining."""
        return None if self.pace is None else self.pace.whole * self.rounds_left

    def __str__(self) -> str:
        if not self.rounds_left:
            return self.text
        return f"{self.text}, {UNKNOWN if self.seconds is None else f'about {about(self.seconds)}'}"


def print_dry_run(config: DictConfig, plans: Mapping[str, Plan]) -> None:
    """Print a line per run, by its title, then the counts and the time left.

    `config` names the launcher.
    """
    found = dict(zip(plans, forecasts([*plans.values()]), strict=True))
    n = n_at_a_time(config, [run.plan for run in found.values() if not run.is_done])
    console, width = console_for_output(), max(map(len, plans))
    for title, run in found.items():
        print_text(console, Text(f"{title:<{width}}  {run}"))
    print_text(console, Text(summary_line([*found.values()], n)))


def forecasts(plans: Sequence[Plan]) -> list[Forecast]:
    """Return what the command would do about each run, with estimates; reads only."""
    found = [forecast(plan) for plan in plans]
    paces = read_paces({run.plan.config.out for run in found if run.rounds_left})
    return [
        replace(run, pace=paces.estimate(flat(asdict(run.plan.config)))) if run.rounds_left else run
        for run in found
    ]


def forecast(plan: Plan) -> Forecast:
    """Return what the command would do about a run, without an estimate."""
    folder, rounds = plan.folder, plan.config.rounds
    if (summary := plan.finished()) is not None:
        return Forecast(plan, FINISHED, f"finished{_note(summary)}")
    if (source := next(plan.finished_elsewhere(), None)) is not None:
        note = _note(source.finished() or {})
        return Forecast(plan, REUSED, f"reused from {source.path.parent}{note}")
    if plan.starts_over(*folder.files):
        return Forecast(plan, TO_RUN, "to run again (rerun=true)", rounds)
    note = " (failed before, tried again)" if _has_failed(folder) else ""
    if folder.checkpoint_file.exists():
        if (done := next_round_of(folder.checkpoint_file)) is None:
            text = f"cannot resume, {folder.checkpoint_file} is damaged"
            return Forecast(plan, TO_RUN, text, rounds)
        return Forecast(plan, TO_RESUME, f"resumes {_place(done, rounds)}{note}", rounds - done)
    for shorter in () if plan.config.rerun else plan.shorter():
        if done := next_round_of(shorter.checkpoint_file):
            text = f"continues {shorter.path.name} {_place(done, rounds)}{note}"
            return Forecast(plan, TO_RESUME, text, rounds - done)
    return Forecast(plan, TO_RUN, f"to run{note}", rounds)


def _note(summary: Record) -> str:
    return " (fedbench has changed since)" if has_changed_since(summary) else ""


def _place(done: int, rounds: int) -> str:
    return f"at round {done + 1} of {rounds}" if done < rounds else "after its last round"


def _has_failed(folder: RunDir) -> bool:
    try:
        summary = unseal_json(folder.summary_file.read_bytes(), folder.id)
    except (OSError, DamageError):
        return False
    return bool(summary["status"] == "failed")


def summary_line(runs: Sequence[Forecast], n: int) -> str:
    """Return the counts and the time left with `n` runs at a time."""
    counts = Counter(run.kind for run in runs)
    kinds = [kind for kind in (FINISHED, REUSED, TO_RESUME, TO_RUN) if counts[kind]]
    listed = ", ".join(f"{counts[kind]} {kind}" for kind in kinds)
    return f"{_runs(len(runs))}: {listed}; {_time_left(runs, n)}"


def _time_left(runs: Sequence[Forecast], n: int) -> str:
    n_left = sum(run.rounds_left > 0 for run in runs)
    if not n_left:
        return "nothing left to compute"
    known = [run.seconds for run in runs if run.seconds is not None]
    if not known:
        return UNKNOWN
    before, n_unknown = _pretraining(runs), n_left - len(known)
    # The longest run cannot be divided among parallel ones.
    text = f"about {about(max((sum(known) + before) / n, *known))} left"
    text += f" with {n} runs at a time" if n > 1 else ""
    text += ", pretraining included" if before else ""
    return text + (f", without {_runs(n_unknown)} with {UNKNOWN}" if n_unknown else "")


def _pretraining(runs: Sequence[Forecast]) -> float:
    """Estimated seconds of the benign rounds before round 0, once for each shared model."""
    seconds: dict[tuple[str, str], float] = {}
    for run in runs:
        model = run.plan.config.out, run.plan.pretrain_id
        if run.kind == TO_RUN and run.pace is not None and model not in seconds:
            seconds[model] = pretraining.rounds_due(run.plan) * run.pace.train
    return sum(seconds.values())


def _runs(n: int) -> str:
    return f"{n} run{'s' * (n != 1)}"
