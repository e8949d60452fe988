"""One round of every defense against the cheapest thing that reads the same updates.

    python -m benchmarks aggregate [--threads 1] [--clients 30 100] [--defense krum flame]

For updates [N, P] as a trained model's clients send them, each defense has a row against one
`updates.mean(0)`, with the peak of extra memory as a ratio to the updates; one against its target,
if it has one, which for rules that need pairwise distances is given in `updates @ updates.T`; and
one against PyPI's byzfl, if it has the rule and is there. Defenses with memory are in their second
round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._byzfl import byzfl
from benchmarks._measure import Options, Row, resident, side_by_side
from fedbench.defense import DEFENSES, Defense, ServerView

OUTPUT_LAYER = {431_080: 5_010, 2_797_610: 2_570}  # of P parameters: the paper's CNN and ResNet
PAIRWISE = ("krum", "foolsgold", "afa", "flame")
MEANS = {"fedavg": 1.2, "auror": 5.0, "baybfed": 15.0}  # targets


def measure(options: Options) -> Iterator[Row]:
    # All are built before any is timed, so that a bad name is told at once.
    rules = {name: DEFENSES.build({"name": name}) for name in options.defense or DEFENSES.names()}
    for n in options.clients or ((4,) if options.quick else (30, 100)):
        for p in OUTPUT_LAYER:
            updates, view = round_of(n, p)
            yield from compare(rules, updates, view, options)


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
    rules: Mapping[str, Defense], updates: Tensor, view: ServerView, options: Options
) -> Iterator[Row]:
    n, p = updates.shape
    threads = f"{options.threads} thread{'s' * (options.threads > 1)}"
    case = f"n = {n}, P = {p:,}, {threads}"
    yardsticks: dict[str, Callable[[], Any]] = {
        "mean": partial(updates.mean, 0),
        "gram": partial(torch.matmul, updates, updates.T),
    }
    yield Row.of(case, side_by_side(yardsticks, options.repeats), "gram", "mean")
    for name, defense in rules.items():
        _, state = defense.aggregate(updates, defense.init(), view)
        rule = partial(defense.aggregate, updates, state, view)
        memory = extra_memory(rule)
        timed: dict[str, Callable[[], Any]] = {**yardsticks, name: rule}
        if (other := in_byzfl(name, n)) is not None:
            timed["byzfl"] = partial(other, updates)
        times = side_by_side(timed, options.repeats)
        notes = {} if memory is None else {"memory": memory / updates.nbytes}
        yield Row.of(case, times, name, "mean", notes)
        if (target := target_of(name, times)) is not None:
            yield Row(case, name, times[name], "target", target)
        if other is not None:
            yield Row.of(case, times, name, "byzfl")


def target_of(name: str, times: Mapping[str, Sequence[float]]) -> list[float] | None:
    """The seconds that a defense should take in each repetition."""
    if name in PAIRWISE:
        pairs = zip(times["mean"], times["gram"], strict=True)
        return [1.5 * gram + 10 * mean for mean, gram in pairs]
    return [MEANS[name] * mean for mean in times["mean"]] if name in MEANS else None


def extra_memory(call: Callable[[], Any]) -> int | None:
    """Bytes by which the resident set grows at most during a call; None but on Linux."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    except OSError:
        return None
    before = resident("VmRSS")
    call()
    peak = resident("VmHWM")
    return None if before is None or peak is None else peak - before


def in_byzfl(name: str, n: int) -> Any:
    """byzfl's rule of that name, from updates [N, P] to [P]; None if there is none."""
    if name not in ("krum", "median") or (rules := byzfl("aggregators.aggregators")) is None:
        return None
    return rules.Median() if name == "median" else rules.Krum(f=(n - 3) // 2)
