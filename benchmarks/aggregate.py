"""One round of every defense against the cheapest thing that reads the same updates.

    python benchmarks/aggregate.py [--repeats 5] [--threads 1 2] [--clients 30 100] [--defense ...]

Printed, for updates [N, P] as a trained model's clients send them: seconds, as a ratio to one
`updates.mean(0)`; as a share of the target, which for rules that need pairwise distances is given
in `updates @ updates.T`; the peak of extra memory as a ratio to the updates; and how many times as
long PyPI's byzfl takes for the same rule, if it is there (`pip install --no-deps byzfl`). All are
medians of side by side repetitions in one process. Defenses with memory are in their second round.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedbench.defense import DEFENSES, ServerView

OUTPUT_LAYER = {431_080: 5_010, 2_797_610: 2_570}  # of P parameters: the paper's CNN and ResNet
PAIRWISE = ("krum", "foolsgold", "afa", "flame")
MEANS = {"fedavg": 1.2, "auror": 5.0, "baybfed": 15.0}  # targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--clients", type=int, nargs="+", default=[30, 100])
    parser.add_argument("--defense", nargs="+", default=DEFENSES.names())
    options = parser.parse_args()
    for n in options.clients:
        for p in OUTPUT_LAYER:
            updates, view = round_of(n, p)
            for threads in options.threads:
                torch.set_num_threads(threads)
                compare(options.defense, updates, view, threads, options.repeats)


def round_of(n: int, p: int) -> tuple[Tensor, ServerView]:
    """Updates with a common part and each its own, some of them scaled, on a larger model."""
    rng = torch.Generator().manual_seed(0)
    common = torch.randn(p, generator=rng)
    updates = torch.empty(n, p)
    for i in range(n):
        factor = 0.05 if i < n // 5 else 0.01
        torch.randn(p, generator=rng, out=updates[i])
        updates[i].add_(common).mul_(factor)
    body = p - OUTPUT_LAYER[p]
    return updates, ServerView(
        index=1,
        client_ids=torch.arange(n),
        global_params=0.05 * torch.randn(p, generator=rng),
        initial_params=0.05 * torch.randn(p, generator=rng),
        layers={"body.weight": slice(0, body), "output.weight": slice(body, p)},
        rng=torch.Generator().manual_seed(1),
    )


def compare(
    names: list[str], updates: Tensor, view: ServerView, threads: int, repeats: int
) -> None:
    n, p = updates.shape
    mean, gram = partial(updates.mean, 0), partial(torch.matmul, updates, updates.T)
    (mean_seconds, gram_seconds), _ = side_by_side([mean, gram], repeats)
    print(
        f"\nn = {n}, P = {p:,}, {threads} thread{'s' * (threads > 1)}: "
        f"mean {1e3 * mean_seconds:.0f} ms, gram {1e3 * gram_seconds:.0f} ms"
    )
    print(f"{'defense':10} {'seconds':>8} {'means':>6} {'of target':>9} {'memory':>7} {'byzfl':>6}")
    for name in names:
        defense = DEFENSES.build({"name": name})
        _, state = defense.aggregate(updates, defense.init(), view)
        rule = partial(defense.aggregate, updates, state, view)
        peak = extra_memory(rule) / updates.nbytes
        other = in_byzfl(name, n)
        timed: list[Callable[[], Any]] = [mean, gram, rule]
        if other is not None:
            timed.append(partial(other, updates))
        _, times = side_by_side(timed, repeats)
        means = ratio(times[2], times[0])
        if name in PAIRWISE:
            target = [1.5 * g + 10 * m for m, g in zip(times[0], times[1], strict=True)]
        else:
            target = [MEANS.get(name, float("nan")) * m for m in times[0]]
        seconds = statistics.median(times[2])
        print(
            f"{name:10} {seconds:8.3f} {means:6.1f} {cell(ratio(times[2], target)):>9} "
            f"{cell(peak):>7} {cell(ratio(times[3], times[2])) if other else '-':>6}",
            flush=True,
        )


def side_by_side(
    calls: list[Callable[[], Any]], repeats: int
) -> tuple[list[float], list[list[float]]]:
    """The median seconds of each call, and all of them; one repetition runs every call once."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, seconds in zip(calls, times, strict=True):
            begun = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begun)
    return [statistics.median(seconds) for seconds in times], times


def ratio(these: list[float], those: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


def cell(value: float) -> str:
    return "-" if value != value else f"{value:.2f}"


def extra_memory(call: Callable[[], Any]) -> float:
    """Bytes by which the resident set grows at most during a call; NaN where Linux does not say."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    except OSError:
        return float("nan")
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def in_byzfl(name: str, n: int) -> Callable[[Tensor], Tensor] | None:
    """byzfl's rule of that name; its package imports torchvision, which its aggregators do not."""
    if name not in ("krum", "median"):
        return None
    if "byzfl" not in sys.modules:
        found = importlib.util.find_spec("byzfl")
        if found is None:
            return None
        sys.modules["byzfl"] = importlib.util.module_from_spec(found)  # not executed
    rules = importlib.import_module("byzfl.aggregators.aggregators")
    return rules.Median() if name == "median" else rules.Krum(f=(n - 3) // 2)


if __name__ == "__main__":
    main()
