"""The W&B report page of a folder of runs: table, text and panels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbench.report.comparison import compare
from fedbench.report.table import notes, to_markdown
from fedbench.results.run_reader import RunResult
from fedbench.tracking.wandb_dashboard import DashboardPlan, plain_name, sections
from fedbench.tracking.wandb_rows import config_key

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2.interface import (
        BlockTypes,
        PanelGrid,
        PanelTypes,
        Report,
        RunsetGroup,
    )

STATUSES = ("finished", "running", "unfinished", "failed", "unreadable")
COLUMNS = {
    "BA": "backdoor accuracy: share of the triggered test samples that the model classifies as the "
    "attacker's target, after the last round. Lower is better.",
    "MA": "main task accuracy: accuracy on the clean test set after the last round. Higher is "
    "better.",
    "TPR": "share of the poisoned updates that the defense rejected, over all attacked rounds.",
    "TNR": "share of the benign updates that the defense accepted, over all attacked rounds.",
    "AUC": "probability that a poisoned update has a higher suspicion score than a benign one.",
    "seconds": "time of all rounds, without pretraining.",
    "seeds": "number of runs that differ in their seed only.",
}
PANELS = {
    "Over the rounds": "A line is the mean over the seeds of a group of runs, and its band reaches "
    "from the lowest to the highest seed. Rates are between 0 and 1.",
    "BA against MA": "The best defenses are at the bottom right: the task is learned, the backdoor "
    "is not.",
    "By setting": "The first two panels show each group of runs. The others show all runs with the "
    "same value of one setting, whatever their other settings.",
    "Clients": "Scores of the benign and the malicious clients have the same bins. The table has a "
    "row per round and client.",
    "Runs": "Settings and results in which the runs differ.",
}


def build_report(plan: DashboardPlan, entity: str, project: str) -> Report:
    import wandb_workspaces.reports.v2.interface as wr

    return wr.Report(
        entity=entity,
        project=project,
        title=plain_name(plan.name),
        description=compare(plan.runs).caption(),
        blocks=[*_results(plan), *_panels(plan), *_definitions(plan)],
        width="fluid",
    )


def _results(plan: DashboardPlan) -> list[BlockTypes]:
    import wandb_workspaces.reports.v2.interface as wr

    blocks: list[BlockTypes] = [
        wr.H2("Results"),
        wr.P(_counted(plan.runs)),
        wr.MarkdownBlock(to_markdown(plan.runs)),
    ]
    # By name: the page is for others, and paths are of this machine.
    left_out = notes([replace(run, folder=Path(run.folder.name)) for run in plan.runs])
    if left_out:
        blocks += [wr.H3("Runs that the table leaves out"), wr.UnorderedList([*left_out])]
    return blocks


def _counted(runs: Sequence[RunResult]) -> str:
    """Return `12 runs: 10 finished, 2 failed`."""
    statuses = Counter(run.status for run in runs)
    counted = ", ".join(f"{statuses[status]} {status}" for status in STATUSES if statuses[status])
    return f"{len(runs)} run{'s' * (len(runs) != 1)}: {counted}"


def _panels(plan: DashboardPlan) -> list[BlockTypes]:
    import wandb_workspaces.reports.v2.interface as wr

    blocks: list[BlockTypes] = []
    for title, panels in sections(plan).items():
        blocks += [wr.H2(title), wr.P(PANELS[title]), _grid(plan, panels)]
    return blocks


def _grid(plan: DashboardPlan, panels: list[PanelTypes]) -> PanelGrid:
    """Return panels with the runs of the folder. Without a project, these are of the report's."""
    import wandb_workspaces.reports.v2.interface as wr

    keys = [config_key(key) for key in plan.keys]
    runset = wr.Runset(name=plain_name(plan.name), groupby=[f"config.{key}" for key in keys])
    # Where the library keeps the filter of a report that it has loaded.
    runset._stashed_filters_v2 = plan.filters()
    runset._stashed_filter_string = ""
    colors: dict[str | RunsetGroup, str | dict[Any, Any]] = {
        wr.RunsetGroup(
            runset_name=runset.name,
            keys=tuple(
                wr.RunsetGroupKey(key=wr.Config(key), value=value)
                for key, value in zip(keys, path, strict=True)
            ),
        ): color
        for path, color in plan.colors().items()
        if len(path) == len(keys)
    }
    return wr.PanelGrid(runsets=[runset], panels=panels, custom_run_colors=colors)


def _definitions(plan: DashboardPlan) -> list[BlockTypes]:
    import wandb_workspaces.reports.v2.interface as wr

    shown = compare(plan.runs).headings
    meanings = [f"{name}: {COLUMNS[name]}" for name in shown if name in COLUMNS]
    return [
        wr.H2("What the columns mean"),
        wr.UnorderedList([*meanings]),
        wr.P(
            "A dash means that a number is undefined: a defense that judges no client has no TPR."
        ),
    ]
