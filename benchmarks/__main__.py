"""Runs benchmarks, prints a table and writes it as JSON; see `python -m benchmarks -h`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from benchmarks._measure import Options
from benchmarks._results import Book, compare, default_path
from fedbench.errors import UserError, nearest

# Setting of some benchmarks -> those
SETTINGS = {
    "defense": ("aggregate",),
    "clients": ("aggregate", "recurrent"),
    "megabytes": ("posts",),
}


def names() -> list[str]:
    """The benchmarks there are: modules of this folder."""
    return sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    try:
        if given.compare:
            compare(*given.compare)
            return 0
        options = Options(
            repeats=1 if given.quick else given.repeats,
            threads=given.threads,
            quick=given.quick,
            defense=tuple(given.defense),
            clients=tuple(given.clients),
            megabytes=given.megabytes,
        )
        chosen = given.names or names()
        check(chosen, options)
        run(chosen, options, given.json or default_path(datetime.now()))
    except UserError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="How fast fedbench is, as ratios of things timed in turn in one run.",
        epilog="ratio: seconds / its seconds, the median over repetitions of each one's ratio; "
        "times as fast: the other way round.",
    )
    made.add_argument("names", nargs="*", metavar="NAME", help=f"all of: {', '.join(names())}")
    made.add_argument("--repeats", type=positive, default=5, help="counted repetitions (5)")
    made.add_argument("--threads", type=positive, default=1, help="of each that is timed (1)")
    made.add_argument("--json", type=Path, metavar="FILE", help="benchmarks/runs/<time>.json")
    made.add_argument("--quick", action="store_true", help="1 repetition and small sizes: a test")
    made.add_argument("--compare", nargs=2, type=Path, metavar=("OLD", "NEW"), help="JSON files")
    own = made.add_argument_group("settings of some benchmarks")
    own.add_argument("--defense", nargs="+", default=[], help="aggregate: rules (all)")
    own.add_argument(
        "--clients",
        nargs="+",
        type=positive,
        default=[],
        help="aggregate, recurrent: numbers of clients (30 and 100, 10)",
    )
    own.add_argument("--megabytes", type=positive, help="posts: size of the dump (100)")
    return made


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def check(chosen: Sequence[str], options: Options) -> None:
    """A UserError for a name or a setting that has no effect here."""
    known = names()
    for name in chosen:
        if name not in known:
            raise UserError(f"{name}: no such benchmark{nearest(name, known)}")
    for setting, owners in SETTINGS.items():
        if getattr(options, setting) and not {*owners} & {*chosen}:
            raise UserError(f"--{setting}: is for {', '.join(owners)}, got {', '.join(chosen)}")


def run(chosen: Sequence[str], options: Options, path: Path) -> None:
    import torch  # takes seconds: mistakes are told before it

    torch.set_num_threads(options.threads)
    book = Book(path, options)
    for name in chosen:
        for row in importlib.import_module(f"benchmarks.{name}").measure(options):
            book.add({"benchmark": name, **row.record()})
    print(f"written to {path}")


if __name__ == "__main__":
    sys.exit(main())
