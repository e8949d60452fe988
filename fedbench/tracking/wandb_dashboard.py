"""DashboardPlan: which runs a W&B dashboard shows, how it groups them, and its panels."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbench.report.comparison import compare
from fedbench.report.defense_styles import defense_styles
from fedbench.report.run_labels import value_of, varying_keys
from fedbench.results.run_reader import RunResult
from fedbench.results.settings import Value, show
from fedbench.tracking.wandb_rows import config_key

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2.interface import PanelTypes
    from wandb_workspaces.workspaces.interface import Workspace

CURVES = ("BA", "MA", "TPR", "TNR")
RESULTS = ("BA", "MA")  # as scatter plots and bars
HISTOGRAMS = ("scores/benign", "scores/malicious")
FIGURES = ("partition",)
CLIENT_TABLE = "clients"
MAX_NAME = 128  # characters of the name of a group, a workspace or a report
MOST_GROUPS = 100  # in a panel; W&B shows 10 unless told otherwise
WIDTH = 24  # of a report, in units of its grid


@dataclass(frozen=True)
class DashboardPlan:
    """What a dashboard shows. `keys` are flat settings, as in config.yaml."""

    name: str
    runs: Sequence[RunResult]
    groups: tuple[str, ...]  # W&B groups of the runs
    keys: tuple[str, ...]  # runs that agree in these differ in their seeds only

    @classmethod
    def of(cls, folder: Path, runs: Sequence[RunResult]) -> DashboardPlan:
        name = folder.resolve().name
        named = {str(run.config["name"])[:MAX_NAME]: None for run in runs if "name" in run.config}
        return cls(name, runs, tuple(named) or (name[:MAX_NAME],), tuple(group_keys(runs)))

    @property
    def n_groups(self) -> int:
        """Number of groups, each with one run per seed."""
        read = [run for run in self.runs if run.config]
        return len({tuple(value_of(run, key) for key in self.keys) for run in read})

    @property
    def limit(self) -> int:
        """Number of lines or bars in a panel."""
        return min(max(self.n_groups, 10), MOST_GROUPS)

    def filters(self) -> dict[str, Any]:
        """Return the filter for the runs of the folder, as W&B stores it.

        The library would write it as an expression and parse that, which fails for names with
        quotes, `=` or `<`.
        """
        from wandb_workspaces import expr

        group = expr.Metric("Group")
        one = len(self.groups) == 1
        chosen: Any = (group == self.groups[0]) if one else group.isin([*self.groups])
        return expr.filters_tree_to_v2(chosen.to_model())

    def colors(self) -> dict[tuple[str, ...], str]:
        """Return the color of each group, by the values of `keys`: that of its defense.

        All groups of a single defense would look the same, so W&B chooses their colors.
        """
        read = [run for run in self.runs if run.config]
        styles = defense_styles([str(value_of(run, "defense")) for run in read])
        found = {}
        for run in read if len(styles) > 1 else ():
            path = tuple(_group_label(value_of(run, key)) for key in self.keys)
            for length in {1, len(path)}:
                found[path[:length]] = styles[str(value_of(run, "defense"))].color
        return found

    def numeric(self, key: str) -> bool:
        values = {run.value(key) for run in self.runs if key in run.config}
        return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def _group_label(value: Value) -> str:
    """Write a value as W&B labels its group: 1 for 1.0."""
    return show(int(value) if isinstance(value, float) and value.is_integer() else value)


def group_keys(runs: Sequence[RunResult]) -> list[str]:
    """Return the defense, the columns of the table, and what else tells two of its rows apart."""
    read = [run for run in runs if run.config]
    keys = ["defense", *(compare(read).keys if read else [])]
    for key in varying_keys(read):
        groups: dict[tuple[Any, ...], set[Any]] = {}
        for run in read:
            of_run = tuple(value_of(run, known) for known in keys)
            groups.setdefault(of_run, set()).add(value_of(run, key))
        if any(len(values) > 1 for values in groups.values()):
            keys.append(key)
    return keys


def curve_panels(plan: DashboardPlan) -> list[PanelTypes]:
    """Return a line plot per rate: the mean over the seeds of a group, their range as a band."""
    import wandb_workspaces.reports.v2.interface as wr

    return [
        wr.LinePlot(
            title=f"{name} over the rounds",
            x="Step",
            y=[name],
            title_x="round",
            range_y=(0, 1),
            groupby_aggfunc="mean",
            groupby_rangefunc="minmax",
            smoothing_type="none",
            max_runs_to_show=plan.limit,
            layout=wr.Layout(w=WIDTH // 2, h=8),
        )
        for name in CURVES
    ]


def tradeoff_panels() -> list[PanelTypes]:
    """Return BA against MA."""
    import wandb_workspaces.reports.v2.interface as wr

    return [
        wr.ScatterPlot(
            title="BA against MA",
            x=wr.SummaryMetric("MA"),
            y=wr.SummaryMetric("BA"),
            range_x=(0, 1),
            range_y=(0, 1),
            layout=wr.Layout(w=WIDTH, h=10),
        )
    ]


def setting_panels(plan: DashboardPlan) -> list[PanelTypes]:
    """Return BA and MA by group of runs, and by each setting in which the runs differ."""
    import wandb_workspaces.reports.v2.interface as wr

    panels: list[PanelTypes] = [
        wr.BarPlot(
            title=f"{name} by {' and '.join(plan.keys)}",
            metrics=[name],
            groupby_aggfunc="mean",
            groupby_rangefunc="minmax",
            max_runs_to_show=plan.limit,
            max_bars_to_show=plan.limit,
            layout=wr.Layout(w=WIDTH // 2, h=8),
        )
        for name in RESULTS
    ]
    for key in plan.keys if len(plan.keys) > 1 else ():
        panels += _key_bars(key)
        panels += _key_points(key) if plan.numeric(key) else []
    return panels


def _key_bars(key: str) -> list[PanelTypes]:
    """Return BA and MA as bars, one per value of a setting."""
    import wandb_workspaces.reports.v2.interface as wr

    return [
        wr.BarPlot(
            title=f"{name} by {key}: mean and range of all runs",
            metrics=[name],
            groupby=wr.Config(config_key(key)),
            groupby_aggfunc="mean",
            groupby_rangefunc="minmax",
            layout=wr.Layout(w=WIDTH // 2, h=8),
        )
        for name in RESULTS
    ]


def _key_points(key: str) -> list[PanelTypes]:
    """Return BA and MA over a setting that is a number."""
    import wandb_workspaces.reports.v2.interface as wr

    return [
        wr.ScatterPlot(
            title=f"{name} over {key}",
            x=wr.Config(config_key(key)),
            y=wr.SummaryMetric(name),
            range_y=(0, 1),
            layout=wr.Layout(w=WIDTH // 2, h=8),
        )
        for name in RESULTS
    ]


def client_panels() -> list[PanelTypes]:
    """Return the score histograms, the table of clients and the figure of the partition."""
    import wandb_workspaces.reports.v2.interface as wr

    media = {"Suspicion scores": HISTOGRAMS, "Samples by class and client": FIGURES}
    return [
        *(
            wr.MediaBrowser(title=title, media_keys=[*keys], layout=wr.Layout(w=WIDTH // 2, h=10))
            for title, keys in media.items()
        ),
        wr.WeavePanelSummaryTable(table_name=CLIENT_TABLE, layout=wr.Layout(w=WIDTH, h=14)),
    ]


def run_panels() -> list[PanelTypes]:
    """Return W&B's table of the settings and results in which the runs differ."""
    import wandb_workspaces.reports.v2.interface as wr

    return [wr.RunComparer(diff_only="split", layout=wr.Layout(w=WIDTH, h=14))]


def sections(plan: DashboardPlan) -> dict[str, list[PanelTypes]]:
    """Return the panels of workspace and report by their headings."""
    return {
        "Over the rounds": curve_panels(plan),
        "BA against MA": tradeoff_panels(),
        "By setting": setting_panels(plan),
        "Clients": client_panels(),
        "Runs": run_panels(),
    }


def build_workspace(plan: DashboardPlan, entity: str, project: str) -> Workspace:
    import wandb_workspaces.workspaces.interface as ws
    from wandb_workspaces import expr

    keys = [config_key(key) for key in plan.keys]
    columns = [f"config:{key}.value" for key in keys] + [f"summary:{name}" for name in CURVES]
    workspace = ws.Workspace(
        entity=entity,
        project=project,
        name=plain_name(plan.name),
        sections=[
            ws.Section(
                name=title,
                panels=panels,
                is_open=True,
                layout_settings=ws.SectionLayoutSettings(columns=2, rows=2),
            )
            for title, panels in sections(plan).items()
        ],
        settings=ws.WorkspaceSettings(max_runs=plan.limit),
        runset_settings=ws.RunsetSettings(
            groupby=[expr.Config(key) for key in keys],
            group_colors={ws.GroupPath(*path): color for path, color in plan.colors().items()},
            pinned_columns=["run:displayName", *columns],
        ),
    )
    # Where the library keeps the filter of a workspace that it has loaded.
    workspace._stashed_filters_v2 = plan.filters()
    workspace._stashed_filter_string = ""
    return workspace


def plain_name(name: str) -> str:
    """Replace the characters that W&B refuses in names: emoji and symbols, also `=` and `+`."""
    refused = ("So", "Sk", "Sm", "Sc", "Cs")
    return "".join("-" if unicodedata.category(c) in refused else c for c in name)[:MAX_NAME]
