"""Break the files of a run, read it as the report does, and repeat its command.

Either nothing is lost, and the numbers are those of the intact run, or one line says what is wrong.
A try damages one or two files of a finished run, of an unfinished one, of one that only finds the
shared model before round 0, or of one that a longer run continues.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from end_to_end import SMALL

import fedbench
from fedbench.composition import compose
from fedbench.config import RunConfig
from fedbench.errors import UserError
from fedbench.plan import Plan
from fedbench.report.benign_pairs import PAIRED
from fedbench.report.report_data import read_report_data
from fedbench.results.checkpoint import Checkpoint
from fedbench.results.run_dir import RunDir
from fedbench.results.run_reader import RunResult, read_runs
from fedbench.single_run import run
from tests.soak.outcome import Outcome

TIMES = 100
NAMES = (
    *("checkpoint.pt", "rounds.jsonl", "summary.json", "config.yaml", "origin.json"),
    *("partition.png", ".lock"),
)
SAVED_ROUNDS = 2  # of the unfinished run


@dataclass(frozen=True)
class Case:
    """Files of runs, and the command that is repeated on a damaged copy of them."""

    name: str
    files: Path  # `out`
    damaged: tuple[str, ...]  # paths below `out`
    other: Path  # a run with another seed, whose files are swapped in
    config: RunConfig
    expected: Any = None  # numbers of the run when nothing is damaged


def soak(times: int, seed: int) -> Iterator[Outcome]:
    rng = random.Random(seed)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        cases = _cases(Path(folder))
        for number in range(times):
            yield _one_try(rng.choice(cases), Path(folder, "try"), rng, f"seed {seed}, {number}")


def _cases(top: Path) -> list[Case]:
    small = [f"{key}={value}" for key, value in SMALL.items()]
    config = compose(["defense=foolsgold", "model.hidden=[4]", *small])
    whole, part, fresh = (top / name / "runs" for name in ("whole", "part", "fresh"))
    save = RunDir.checkpoint

    def copy_while_running(folder: RunDir, checkpoint: Checkpoint) -> None:
        save(folder, checkpoint)
        if checkpoint.next_round == SAVED_ROUNDS:
            shutil.copytree(whole, part)

    with contextlib.redirect_stdout(io.StringIO()):
        with mock.patch.object(RunDir, "checkpoint", copy_while_running):
            run(replace(config, out=str(whole)))
        shutil.copytree(whole / ".pretrained", fresh / ".pretrained")
        run(replace(config, out=str(top / "other"), seed=1))
    (other,) = (top / "other" / config.name).iterdir()
    (shared,) = whole.glob(".pretrained/*.pt")
    folder = Plan.of(config).folder.path.relative_to(config.out)
    model, files = f".pretrained/{shared.name}", tuple(f"{folder}/{name}" for name in NAMES)
    longer = replace(config, rounds=config.rounds + 1)
    cases = [
        Case("finished", whole, files, other, config),
        Case("unfinished", part, (*files, model), other, config),
        Case("pretrained", fresh, (model,), other, config),
        Case("continued", whole, (*files, model), other, longer),
    ]
    return [replace(case, expected=_intact(case, top / "intact")) for case in cases]


def _intact(case: Case, out: Path) -> Any:
    shutil.copytree(case.files, out)
    with contextlib.redirect_stdout(io.StringIO()):
        run(replace(case.config, out=str(out)))
    numbers = _numbers(Plan.of(replace(case.config, out=str(out))).folder.path)
    shutil.rmtree(out)
    return numbers


def _one_try(case: Case, out: Path, rng: random.Random, name: str) -> Outcome:
    """Damage a copy, read it, repeat the command, read it again."""
    shutil.copytree(case.files, out)
    try:
        steps = [_damage(case, out, rng) for _ in range(rng.choice([1, 1, 2]))]
        about = f"{name}: {case.name}, {' and '.join(steps)}"
        try:
            _check_reading(case, out)
            ended = _repeat(case, out)
        except Exception as error:
            return Outcome(f"{case.name}: failed", f"{about}: {type(error).__name__}: {error}")
        return Outcome(f"{case.name}: {ended}")
    finally:
        shutil.rmtree(out)


def _repeat(case: Case, out: Path) -> str:
    """Repeat the command; its numbers are right, or it ends with one line."""
    config = replace(case.config, out=str(out))
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            run(config)
    except UserError as error:
        _require_one_line(error)
        return "refused in one line"
    (result,) = read_runs([Plan.of(config).folder.path])
    if result.status != "finished":
        raise AssertionError(f"exit code 0, but {result.status}: {result.reason}")
    if _numbers(result.folder) != case.expected:
        raise AssertionError("other numbers, exit code 0")
    return "made good" if "again" in printed.getvalue() else "same numbers"


def _check_reading(case: Case, out: Path) -> None:
    """Read the runs as reports and notebooks do: what is not refused has the right numbers."""
    top = out / case.config.name
    try:
        runs = read_runs([top])
        data = read_report_data([top])
    except UserError as error:  # no run is left
        _require_one_line(error)
        return
    whole = {result.folder.name: result for result in read_runs([case.files / case.config.name])}
    for result in (*runs, *data.runs):
        _require_one_line(result.reason)
        if result.status == "finished":
            _require_equal(result, whole[result.folder.name])
        elif result.metrics:
            raise AssertionError(f"{result.status}, but with results")
    for result in runs:
        try:
            found = fedbench.load_rounds(result.folder)
        except UserError as error:
            _require_one_line(error)
        else:
            intact = fedbench.load_rounds(whole[result.folder.name].folder)
            columns = found.columns.drop("folder")
            if len(found) and not found[columns].equals(intact[columns].head(len(found))):
                raise AssertionError("load_rounds has other numbers")


def _require_equal(found: RunResult, whole: RunResult) -> None:
    metrics = {key: value for key, value in found.metrics.items() if key not in PAIRED}
    if (metrics, found.config, found.origin) != (whole.metrics, whole.config, whole.origin):
        raise AssertionError("finished, with other numbers or settings")


def _require_one_line(message: object) -> None:
    if "\n" in str(message):
        raise AssertionError(f"more than one line: {message}")


def _numbers(folder: Path) -> Any:
    """The results of a run, without its times."""
    (result,) = read_runs([folder])
    metrics = {key: value for key, value in result.metrics.items() if key != "seconds"}
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    timeless = [{k: v for k, v in r.items() if k not in ("seconds", "check")} for r in rounds]
    return result.status, metrics, timeless


def _damage(case: Case, out: Path, rng: random.Random) -> str:
    """Damage a file; return what was done."""
    path = out / rng.choice([name for name in case.damaged if (out / name).exists()] or ["gone"])
    if not path.is_file():
        return "nothing left to damage"
    names = [name for name in DAMAGES if name != "swapped" or (case.other / path.name).exists()]
    how = rng.choice(names)
    if how == "swapped":
        shutil.copyfile(case.other / path.name, path)
    elif how in ("deleted", "a directory"):
        path.unlink()
        if how == "a directory":
            path.mkdir()
    else:
        path.write_bytes(DAMAGES[how](path.read_bytes(), rng))
    return f"{path.name} {how}"


def _with_flipped_bit(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    if changed:
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _with_edited_number(content: bytes, rng: random.Random) -> bytes:
    numbers = [*re.finditer(rb"\d+", content)]
    if not numbers:
        return content
    found = rng.choice(numbers)
    new = rng.choice([b"7", b"0", b"NaN", b"1e999", b"9" * 5000, b"-1", b'"1"', b"[" * 5000])
    return content[: found.start()] + new + content[found.end() :]


def _with_lines(change: Callable[[list[bytes], random.Random], object]) -> Any:
    def edit(content: bytes, rng: random.Random) -> bytes:
        lines = content.splitlines(keepends=True)
        if lines:
            change(lines, rng)
        return b"".join(lines)

    return edit


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "with a flipped bit": _with_flipped_bit,
    "truncated": lambda content, rng: content[: rng.randrange(len(content) + 1)],
    "with an edited number": _with_edited_number,
    "with a line twice": _with_lines(lambda lines, rng: lines.insert(0, rng.choice(lines))),
    "with its last line twice": _with_lines(lambda lines, rng: lines.append(lines[-1])),
    "without a line": _with_lines(lambda lines, rng: lines.pop(rng.randrange(len(lines)))),
    "with lines in another order": _with_lines(lambda lines, rng: rng.shuffle(lines)),
    "empty": lambda content, rng: b"",
    "of zeros": lambda content, rng: bytes(len(content)),
    "of random bytes": lambda content, rng: rng.randbytes(rng.randrange(3000)),
    "of JSON": lambda content, rng: rng.choice([b"{}", b"[]", b"null", b'{"status": "finished"}']),
    "nested deeply": lambda content, rng: b"[" * 100_000,
    "swapped": lambda content, rng: content,
    "deleted": lambda content, rng: content,
    "a directory": lambda content, rng: content,
}
