"""Run benchmarks, print a table and save it as JSON; see `python -m benchmarks -h`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from benchmarks._measure import Options
from benchmarks._results import ResultWriter, compare, default_path
from fedbench.errors import UserError, nearest

# Options that only some benchmarks use
SETTINGS = {
    "defense": ("aggregate",),
    "clients": ("aggregate", "recurrent"),
    "megabytes": ("posts",),
}


def names() -> list[str]:
    """Names of all benchmarks: the modules of this folder."""
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
    result = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure the speed of fedbench as ratios. Both sides of a ratio are timed "
        "alternately in one run.",
        epilog="ratio: seconds / baseline s, the median over repetitions; times as fast: the "
        "median of the inverse.",
    )
    add = result.add_argument
    add("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(names())}")
    add("--repeats", type=positive, default=5, help="timed repetitions (default: 5)")
    add("--threads", type=positive, default=1, help="per process (default: 1)")
    add("--json", type=Path, metavar="FILE", help="default: benchmarks/runs/<time>.json")
    add("--quick", action="store_true", help="smoke test: 1 repetition, small sizes")
    add("--compare", nargs=2, type=Path, metavar=("OLD", "NEW"), help="compare two JSON files")
    add = result.add_argument_group("options of single benchmarks").add_argument
    add("--defense", nargs="+", default=[], help="aggregate: defenses (default: all)")
    clients = "aggregate, recurrent: numbers of clients (default: 30 and 100, 10)"
    add("--clients", nargs="+", type=positive, default=[], help=clients)
    add("--megabytes", type=positive, help="posts: size of the dump (default: 100)")
    return result


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def check(chosen: Sequence[str], options: Options) -> None:
    """Raise UserError for unknown benchmarks and for options that none of the chosen ones use."""
    known = names()
    for name in chosen:
        if name not in known:
            raise UserError(f"{name}: no such benchmark{nearest(name, known)}")
    for setting, owners in SETTINGS.items():
        if getattr(options, setting) and not {*owners} & {*chosen}:
            raise UserError(
                f"--{setting}: must be used with {' or '.join(owners)}, got {', '.join(chosen)}"
            )


def run(chosen: Sequence[str], options: Options, path: Path) -> None:
    import torch  # takes seconds; user errors must print before that

    torch.set_num_threads(options.threads)
    writer = ResultWriter(path, options)
    for name in chosen:
        for row in importlib.import_module(f"benchmarks.{name}").measure(options):
            writer.add({"benchmark": name, **row.record()})
    print(f"saved to {path}")


if __name__ == "__main__":
    sys.exit(main())
