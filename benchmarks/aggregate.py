"""Aggregation time of every defense, compared to averaging the same updates.

    python -m benchmarks aggregate [--threads 1] [--clients 30 100] [--defense krum flame]

Updates [N, P] resemble those of a trained model's clients. Each defense has up to three rows:
compared to one `updates.mean(0)`, with its peak extra memory as a multiple of the updates' size;
to its target, if it has one; and to byzfl (from PyPI), if installed and it has the same rule. The
target of defenses that need pairwise distances includes `updates @ updates.T`. Stateful defenses
are timed in their second round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._byzfl import byzfl
from benchmarks._measure import Options, Row, process_memory, time_interleaved
from fedbench.defense import DEFENSES, Defense, ServerView

OUTPUT_LAYER = {
    431_080: 5_010,
    2_797_610: 2_570,
}  # by P, of the paper's CNN and ResNet
PAIRWISE = ("krum", "foolsgold", "afa", "flame")
TARGET_MEANS = {"fedavg": 1.2, "auror": 5.0, "baybfed": 15.0}  # multiples of one mean


def measure(options: Options) -> Iterator[Row]:
    # Build all first, so that a wrong name fails at once.
    chosen = options.defense or DEFENSES.names()
    defenses = {name: DEFENSES.build({"name": name}) for name in chosen}
    for n in options.clients or ((4,) if options.quick else (30, 100)):
        for p in OUTPUT_LAYER:
            updates, view = synthetic_round(n, p)
            yield from compare(defenses, updates, view, options)


def synthetic_round(n: int, p: int) -> tuple[Tensor, ServerView]:
    """Draw updates with a common and an individual part; a fifth of them are scaled up."""
    rng = torch.Generator().manual_seed(0)
    common = torch.randn(p, generator=rng)
    updates = torch.empty(n, p)
    for i in range(n):
        scale = 0.05 if i < n // 5 else 0.01
        torch.randn(p, generator=rng, out=updates[i])
        updates[i].add_(common).mul_(scale)
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
    defenses: Mapping[str, Defense], updates: Tensor, view: ServerView, options: Options
) -> Iterator[Row]:
    n, p = updates.shape
    threads = f"{options.threads} thread{'s' * (options.threads > 1)}"
    case = f"n = {n}, P = {p:,}, {threads}"
    baselines: dict[str, Callable[[], Any]] = {
        "mean": partial(updates.mean, 0),
        "gram": partial(torch.matmul, updates, updates.T),
    }
    yield Row.of(case, time_interleaved(baselines, options.repeats), "gram", "mean")
    for name, defense in defenses.items():
        _, state = defense.aggregate(updates, defense.init(), view)
        aggregate = partial(defense.aggregate, updates, state, view)
        memory = extra_memory(aggregate)
        timed: dict[str, Callable[[], Any]] = {**baselines, name: aggregate}
        if (peer := byzfl_rule(name, n)) is not None:
            timed["byzfl"] = partial(peer, updates)
        times = time_interleaved(timed, options.repeats)
        notes = {} if memory is None else {"memory": memory / updates.nbytes}
        yield Row.of(case, times, name, "mean", notes)
        if (target := target_seconds(name, times)) is not None:
            yield Row(case, name, times[name], "target", target)
        if peer is not None:
            yield Row.of(case, times, name, "byzfl")


def target_seconds(name: str, times: Mapping[str, Sequence[float]]) -> list[float] | None:
    """Seconds that a defense should take, per repetition; None if it has no target."""
    if name in PAIRWISE:
        pairs = zip(times["mean"], times["gram"], strict=True)
        return [1.5 * gram + 10 * mean for mean, gram in pairs]
    if name in TARGET_MEANS:
        return [TARGET_MEANS[name] * mean for mean in times["mean"]]
    return None


def extra_memory(call: Callable[[], Any]) -> int | None:
    """Peak growth of resident memory during a call, in bytes; None except on Linux."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    except OSError:
        return None
    before = process_memory("VmRSS")
    call()
    peak = process_memory("VmHWM")
    return None if before is None or peak is None else peak - before


def byzfl_rule(name: str, n: int) -> Any:
    """byzfl's rule of this name, from updates [N, P] to [P]; None if not available."""
    if name not in ("krum", "median") or (rules := byzfl("aggregators.aggregators")) is None:
        return None
    return rules.Median() if name == "median" else rules.Krum(f=(n - 3) // 2)
