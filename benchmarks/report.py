"""Time to make a report of many runs, compared to parsing the JSON of their rounds.

    python -m benchmarks report

The runs are made up: 500 of 50 rounds and 30 clients. The baseline is `json.loads` of every line of
their rounds.jsonl, about 100 MB. `page` is `fedbench report --format html`; `everything` adds
LaTeX, Markdown, CSV, and all figures as SVG, PDF and PNG.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks._measure import Options, Row, repeat_interleaved, time_call

DEFENSES = ("fedavg", "krum", "median", "flame", "baybfed")
ATTACKS = ("dba", "edge_case")
PMRS = (0.1, 0.2, 0.3, 0.4, 0.5)
BASELINE = "json.loads"


def measure(options: Options) -> Iterator[Row]:
    pmrs, n_seeds, n_rounds, n_clients = (
        (PMRS[:1], 1, 2, 4) if options.quick else (PMRS, 10, 50, 30)
    )
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        n_runs = add_runs(top, [*product(pmrs, range(n_seeds))], n_rounds, n_clients)
        cases = {
            "page": partial(report, top, "--format", "html"),
            "everything": partial(report, top),
            BASELINE: partial(parse, top),
        }
        timers = {name: partial(time_call, case) for name, case in cases.items()}
        times = repeat_interleaved(timers, options.repeats, warm_up=not options.quick)
    case = f"{n_runs} runs, {n_rounds} rounds, {n_clients} clients"
    for what in ("page", "everything"):
        yield Row.of(case, times, what, BASELINE)


def report(top: Path, *options: str) -> None:
    command = [sys.executable, "-m", "fedbench.report", str(top), *options]
    subprocess.run(command, check=True, capture_output=True)


def parse(top: Path) -> None:
    for path in top.glob("*/rounds.jsonl"):
        for line in path.read_text().splitlines():
            json.loads(line)


def add_runs(
    top: Path, settings: Sequence[tuple[float, int]], n_rounds: int, n_clients: int
) -> int:
    """Create finished runs with each pmr and seed of `settings`; return their number."""
    from fedbench.composition import compose
    from fedbench.results.run_dir import RunDir
    from fedbench.results.summary import summarise

    count = 0
    for defense, attack in product(DEFENSES, ATTACKS):
        config = compose([f"defense={defense}", f"attack={attack}"])
        records = [record(index, n_clients) for index in range(n_rounds)]
        for pmr, seed in settings:
            folder = RunDir(top / f"run{count}")
            folder.path.mkdir()
            folder.start(replace(config, pmr=pmr, seed=seed))
            folder.rounds_file.write(records)
            folder.finish(summarise(records) | {"BA": random.random(), "MA": random.random()})
            count += 1
    return count


def record(index: int, n_clients: int) -> dict[str, Any]:
    """Return a line of rounds.jsonl."""
    rates = {key: random.random() for key in ("MA", "BA", "TPR", "TNR", "AUC")}
    stealth = {key: random.random() for key in ("norm_ratio", "cosine", "benign_cosine")}
    return {
        **{"round": index, "attacked": True, "pdr": 0.5, "applied": True, **rates},
        **{"threshold": None, **stealth, "BA_by_backdoor": {"0": rates["BA"]}},
        "seconds": {step: random.random() for step in ("train", "aggregate", "evaluate")},
        "clients": [client(number, n_clients) for number in range(n_clients)],
    }


def client(number: int, n_clients: int) -> dict[str, Any]:
    score = random.random()
    measured = {key: random.random() for key in ("weight", "norm", "cosine")}
    verdict = {"malicious": number < n_clients // 4, "accepted": score < 0.5, "score": score}
    return {"id": number, **verdict, **measured}
