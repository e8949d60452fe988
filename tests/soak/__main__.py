"""Run soak tests and count what they found; see `python -m tests.soak -h`."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.soak.outcome import Outcome

NOT_SOAKS = ("outcome",)
SHOWN = 20  # failures
INTERVAL = 10.0  # seconds between lines about the progress


def names() -> list[str]:
    """Names of all soak tests: the modules of this folder."""
    modules = sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))
    return [name for name in modules if name not in NOT_SOAKS and not name.startswith("test_")]


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    failed = False
    for name in given.names or names():
        module = importlib.import_module(f"tests.soak.{name}")
        times = module.TIMES if given.times is None else given.times
        failed |= run(name, module.soak(times, given.seed), times)
    return int(failed)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description="Repeat a fault many times and count what happens. "
        "Exits with 1 if any try did not end as it should.",
    )
    add = result.add_argument
    add("names", nargs="*", metavar="NAME", choices=[*names(), []], help=", ".join(names()))
    add("--times", type=int, help="number of tries (default: as in docs/reliability.md)")
    add("--seed", type=int, default=0, help="which tries (default: 0)")
    return result


def run(name: str, outcomes: Iterator[Outcome], times: int) -> bool:
    """Print the counts and the first failures; return whether there was one."""
    counts: Counter[str] = Counter()
    failures: list[str] = []
    start = last = time.monotonic()
    for outcome in outcomes:
        counts[outcome.kind] += 1
        if outcome.failure is not None:
            failures.append(outcome.failure)
            if len(failures) <= SHOWN:
                print(f"FAILED  {outcome.kind}: {outcome.failure}", flush=True)
        if time.monotonic() - last >= INTERVAL:
            last = time.monotonic()
            print(f"{name}  {counts.total()} of {times}, {len(failures)} failed", flush=True)
    seconds = time.monotonic() - start
    print(f"{name}  {counts.total()} tries, {len(failures)} failed, {seconds:.0f} s")
    for kind, n in counts.most_common():
        print(f"  {n:6d}  {kind}")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
