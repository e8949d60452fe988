"""Published numbers next to ours: reads them from YAML files and finds the rows they belong to.

fedbench ships those of the BayBFed paper. A folder `reported` in the working folder adds others:

    source: {authors: [Ann Lee, Bo Kim], title: Our Defense, venue: NDSS, year: 2024, link: https://...}
    where: Table 1
    entries:
      - dataset: cifar10
        attack: constrain_and_scale
        defense: fedavg  # no defense
        settings: {pmr: 0.2, attack.alpha: 0.5}  # only those that the paper states
        metrics: {BA: 100.0, MA: 90.5}  # in percent
        note: The text says BA 98.

`note` and `settings` are optional. An entry's own `where` replaces that of the file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

import fedbench
from fedbench.config import rounded_count
from fedbench.errors import UserError, did_you_mean
from fedbench.report.comparison import TableRow
from fedbench.report.run_labels import value_of
from fedbench.report.statistics import Estimate, estimate
from fedbench.results.run_reader import Loader, RunResult
from fedbench.results.settings import Value, flat, group_of, idle

SHIPPED = Path(fedbench.__file__).parent / "assets" / "reported"
LOCAL = "reported"  # folder of the user's own files, in the working folder
REPORTED_METRICS = ("BA", "MA", "TPR", "TNR")
NAMES = ("dataset", "attack", "defense")
SAMPLE = "_sample"  # end of the name of a data set that stands in for the real one
# A run with a changed setting of these groups is a variant, not what the paper measured.
# Papers rarely state their triggers, so other backdoors do not make a variant.
VARIANT_GROUPS = ("attack", "defense", "model")
BACKDOORS = "attack.backdoors"


@dataclass(frozen=True)
class Publication:
    """Where numbers were published."""

    authors: tuple[str, ...]
    title: str
    venue: str
    year: int
    link: str

    @property
    def citation(self) -> str:
        """Return `Kumari et al., IEEE S&P 2023`."""
        names = [author.split()[-1] for author in self.authors]
        who = " and ".join(names) if len(names) < 3 else f"{names[0]} et al."
        return f"{who}, {self.venue} {self.year}"


@dataclass(frozen=True)
class ReportedValue:
    """The numbers that a paper reports for one defense in one setting."""

    source: Publication
    where: str  # table, figure or section
    dataset: str
    attack: str
    defense: str
    settings: Mapping[str, Value]  # flat; only those that the paper states
    metrics: Mapping[str, float]  # 0..1
    note: str  # where the paper is ambiguous or contradicts itself


@dataclass(frozen=True)
class ReportedMatch:
    """A number of a paper and the row that measures the same."""

    reported: ReportedValue
    row: TableRow
    metric: str
    paper: float
    ours: Estimate
    difference: float  # mean of ours minus paper
    stands_in: bool  # ours is a sample data set: other data than the paper's
    unstated: Mapping[str, Value]  # settings changed by the user about which the paper says nothing


def read_reported(folders: Sequence[Path] | None = None) -> list[ReportedValue]:
    """Read all *.yaml files of the folders: by default fedbench's, and `reported` where we are."""
    if folders is None:
        folders = [SHIPPED, Path(LOCAL)]
    unique = dict.fromkeys(folder.resolve() for folder in folders)
    paths = [path for folder in unique for path in sorted(folder.glob("*.yaml"))]
    return [value for path in paths for value in _read(path)]


def match(rows: Sequence[TableRow], reported: Sequence[ReportedValue]) -> list[ReportedMatch]:
    """Find the reported numbers of each row, those with the most stated settings first."""
    specific_first = sorted(reported, key=lambda value: -len(value.settings))
    matches = []
    for row in rows:
        run = row.runs[0]  # all runs of a row share their settings
        for value in specific_first:
            if run.config and (unstated := _unstated(value, run)) is not None:
                stands_in = value_of(run, "dataset") != value.dataset
                matches += _matches(value, row, stands_in, unstated)
    return matches


def _matches(
    value: ReportedValue, row: TableRow, stands_in: bool, unstated: Mapping[str, Value]
) -> list[ReportedMatch]:
    found = []
    for metric, paper in value.metrics.items():
        ours = estimate({run.value("seed"): run.metrics.get(metric) for run in row.finished})
        if ours is not None:
            difference = ours.mean - paper
            found.append(
                ReportedMatch(value, row, metric, paper, ours, difference, stands_in, unstated)
            )
    return found


def _unstated(value: ReportedValue, run: RunResult) -> dict[str, Value] | None:
    """Return the changed settings that the paper does not state; None if the run does not match."""
    dataset, attack, defense = (str(value_of(run, name)) for name in NAMES)
    if value.dataset not in (dataset, dataset.removesuffix(SAMPLE)):
        return None
    if (value.attack, value.defense) != (attack, defense):
        return None
    changed = None if run.origin is None else run.origin.changed
    without_effect = idle(run.config)
    stated = value.settings
    if changed is None or any(
        key in without_effect
        or not same_setting(key, stated[key], run.value(key), run.value("n_clients"))
        for key in stated
    ):
        return None
    others = {
        key: setting
        for key, setting in changed.items()
        if key not in {*stated, *without_effect, *NAMES}
    }
    is_variant = any(group_of(key) in VARIANT_GROUPS and key != BACKDOORS for key in others)
    return None if is_variant else others


def same_setting(key: str, paper: Value, ours: Value, n_clients: Value) -> bool:
    """Whether a run has a stated setting. Shares of malicious clients are equal if the number is.

    With 30 clients, pmr 0.33 and 1/3 are both 10.
    """
    if key == "pmr" and isinstance(n_clients, int):
        rates = [rate for rate in (paper, ours) if isinstance(rate, int | float)]
        return len({rounded_count(rate, n_clients) for rate in rates}) == 1 and len(rates) == 2
    return paper == ours


def _read(path: Path) -> list[ReportedValue]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader)
        _check_keys("the file", content, ["source", "where", "entries"], ["note"])
        source = _publication(content["source"])
        if not isinstance(content["entries"], list):
            raise ValueError("entries must be a list")
        shared = {key: content[key] for key in ("where", "note") if key in content}
        numbered = enumerate(content["entries"], start=1)
        return [_value(f"entry {n}", entry, source, shared) for n, entry in numbered]
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise UserError(f"{path}: not YAML{line}") from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from error


def _publication(content: Any) -> Publication:
    keys = ["authors", "title", "venue", "year", "link"]
    _check_keys("source", content, keys)
    authors = content["authors"]
    if not isinstance(authors, list) or not authors or not all(map(_is_text, authors)):
        raise ValueError(f"authors must be a list of names, got {authors!r}")
    if type(content["year"]) is not int:
        raise ValueError(f"year must be a number, got {content['year']!r}")
    title, venue, link = (_text(key, content[key]) for key in ("title", "venue", "link"))
    return Publication(tuple(authors), title, venue, content["year"], link)


def _value(
    place: str, content: Any, source: Publication, shared: Mapping[str, Any]
) -> ReportedValue:
    _check_keys(place, content, [*NAMES, "metrics"], ["settings", "where", "note"])
    settings, metrics = content.get("settings") or {}, content["metrics"]
    if not isinstance(settings, dict):
        raise ValueError(f"{place}: settings must be a mapping, got {settings!r}")
    _check_keys(f"{place}: metrics", metrics, [], REPORTED_METRICS)
    for metric, number in metrics.items():
        if type(number) not in (int, float) or not 0 <= number <= 100:
            raise ValueError(f"{place}: {metric} must be a percentage, 0 to 100, got {number!r}")
    notes = [_text(f"{place}: note", at["note"]) for at in (shared, content) if "note" in at]
    where = _text(f"{place}: where", content.get("where", shared["where"]))
    dataset, attack, defense = (_text(f"{place}: {key}", content[key]) for key in NAMES)
    # 92.6 / 100 is 0.9259999999999999 in floating point.
    rates = {metric: float(Decimal(str(number)) / 100) for metric, number in metrics.items()}
    return ReportedValue(
        source, where, dataset, attack, defense, flat(settings), rates, " ".join(notes)
    )


def _check_keys(
    place: str, content: Any, required: Collection[str], optional: Collection[str] = ()
) -> None:
    """Raise ValueError unless `content` has all required keys and no others than these."""
    known = [*required, *optional]
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{place} must be a mapping with {', '.join(known)}")
    for key in content:
        if key not in known:
            hint = did_you_mean(str(key), known)
            raise ValueError(f"{place} has no key {key!r}{hint} (known: {', '.join(known)})")
    if missing := [key for key in required if key not in content]:
        raise ValueError(f"{place} lacks {missing[0]}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.strip() != ""


def _text(key: str, value: Any) -> str:
    if not _is_text(value):
        raise ValueError(f"{key} must be text, got {value!r}")
    return str(value)
