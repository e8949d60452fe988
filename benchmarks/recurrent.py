"""Does it pay to train clients of recurrent networks side by side? A step of all, as a ratio.

`sequential` takes the gradients of one client after another, `vmap` those of all clients at once by
torch.func over stacked parameters; both are of the same clients and end with the same gradients.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from fedbench.models import MODELS

# Model, settings, symbols, batch, length; without dropout, so that the gradients can be compared
CASES = (
    ("gru", {}, 256, 16, 20),
    ("lstm", {"dropout": 0.0}, 5000, 5, 64),
)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def compare(
    name: str, settings: dict[str, float], n_symbols: int, shape: tuple[int, int, int], repeats: int
) -> None:
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

    seconds: dict[str, list[float]] = {"sequential": [], "vmap": []}
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        sequential()
        seconds["sequential"].append(time.perf_counter() - begun)
        begun = time.perf_counter()
        gradients = step(params, x, y)
        seconds["vmap"].append(time.perf_counter() - begun)
    for key, parameter in clients[-1].named_parameters():
        torch.testing.assert_close(gradients[key][-1], parameter.grad, rtol=1e-3, atol=1e-5)
    pairs = list(zip(seconds["vmap"], seconds["sequential"], strict=True))[1:]  # without warm-up
    one, all_at_once = (statistics.median(times[1:]) for times in seconds.values())
    print(
        f"{name:5}  {n_clients} clients of {n_symbols:,} symbols  sequential {one:6.3f} s  "
        f"vmap {all_at_once:6.3f} s  ratio {statistics.median(a / b for a, b in pairs):.2f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clients", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of operations that vmap does one by one
    for name, settings, n_symbols, batch, length in CASES:
        shape = (arguments.clients, batch, length)
        compare(name, settings, n_symbols, shape, arguments.repeats)
