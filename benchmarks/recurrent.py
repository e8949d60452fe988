"""Does stacking clients make recurrent networks faster? Times the gradients of one step.

    python -m benchmarks recurrent [--clients 10]

`sequential` computes the gradients of one client after another, `vmap` those of all clients at once
by torch.func over stacked parameters. Both compute the same gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from benchmarks._measure import Options, Row, time_interleaved
from fedbench.models import MODELS

# Model, settings, symbols, batch size, length; no dropout, so that gradients are comparable
CASES: tuple[tuple[str, dict[str, float], int, int, int], ...] = (
    ("gru", {}, 256, 16, 20),
    ("lstm", {"dropout": 0.0}, 5000, 5, 64),
)


def measure(options: Options) -> Iterator[Row]:
    for n_clients in options.clients or (2 if options.quick else 10,):
        for name, settings, n_symbols, batch, length in CASES:
            shape = (n_clients, batch, length)
            with warnings.catch_warnings(action="ignore"):  # vmap: no batching rule
                yield compare(name, settings, n_symbols, shape, options.repeats)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def compare(
    name: str, settings: dict[str, float], n_symbols: int, shape: tuple[int, int, int], repeats: int
) -> Row:
    torch.manual_seed(0)
    n_clients, _, length = shape
    model = MODELS.build({"name": name, **settings})
    clients = [model.build((length,), n_symbols) for _ in range(n_clients)]
    x, y = torch.randint(n_symbols, (2, *shape))
    params = {k: p.detach() for k, p in stack_module_state(clients)[0].items()}
    base = model.build((length,), n_symbols)
    step = vmap(grad(lambda p, x, y: loss_of(functional_call(base, p, (x,)), y)))

    def sequential() -> None:
        for client, words, labels in zip(clients, x, y, strict=True):
            client.zero_grad()
            loss_of(client(words), labels).backward()

    times = time_interleaved(
        {"sequential": sequential, "vmap": lambda: step(params, x, y)}, repeats
    )
    gradients = step(params, x, y)
    for key, parameter in clients[-1].named_parameters():
        torch.testing.assert_close(gradients[key][-1], parameter.grad, rtol=1e-3, atol=1e-5)
    case = f"{name}, {n_clients} clients of {n_symbols:,} symbols"
    return Row.of(case, times, "vmap", "sequential")
