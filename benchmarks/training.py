"""Client training through the harness against a loop written by hand, side by side in one run.

    python benchmarks/training.py [--repeats 5] [--threads 1]

Both train the same 30 clients from the same global model on the same batches, with the same number
of threads, and end with updates [N, P]. Printed: seconds of each, and harness / hand-written.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

from fedbench.attack import ATTACKS
from fedbench.config import RunConfig
from fedbench.data import DATASETS, Dataset
from fedbench.executors import Sequential, Workforce
from fedbench.models import MODELS
from fedbench.population import Order, Population
from fedbench.rng import generator


def by_hand(
    model: nn.Module, data: Dataset, x_train: Tensor, population: Population, order: Order
) -> Tensor:
    """What one would write without a harness: a float tensor, an index, SGD with momentum."""
    config = population.config
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    updates = []
    for job in order.jobs:
        model.load_state_dict(start)
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=config.momentum)
        samples = population.shards[job.client]
        rng = generator(config.seed, "batches", order.index, job.client)
        for _ in range(config.local_epochs):
            shuffled = samples[torch.randperm(len(samples), generator=rng)]
            for batch in shuffled.split(config.batch_size):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x_train[batch]), data.y_train[batch])
                loss.backward()
                optimizer.step()
        updates.append(nn.utils.parameters_to_vector(model.parameters()).detach() - order.params)
    model.load_state_dict(start)
    return torch.stack(updates)


def compare(model_name: str, repeats: int, threads: int) -> None:
    data = DATASETS.build({"name": "fmnist_sample"}).load()
    config = RunConfig(local_epochs=1)
    executor = Sequential(threads=threads)
    fabric = executor.fabric()
    torch.set_num_threads(threads)
    network = MODELS.build({"name": model_name}).build(data.input_shape, data.n_classes)
    attack = ATTACKS.build({"name": "none"})
    population = Population(config, data, network, attack, fabric)
    workforce = Workforce(executor, fabric, population)
    layout = population.layout
    order = Order(0, population.select(0), layout.read_params(), layout.read_buffers())
    model = MODELS.build({"name": model_name}).build(data.input_shape, data.n_classes)
    nn.utils.vector_to_parameters(order.params.clone(), model.parameters())
    x_train = data.decode(data.x_train)

    seconds: dict[str, list[float]] = {"by hand": [], "harness": []}
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        expected = by_hand(model, data, x_train, population, order)
        seconds["by hand"].append(time.perf_counter() - begun)
        begun = time.perf_counter()
        updates, _ = workforce.train(order)
        seconds["harness"].append(time.perf_counter() - begun)
    torch.testing.assert_close(updates, expected, rtol=1e-3, atol=1e-5)
    pairs = list(zip(seconds["harness"], seconds["by hand"], strict=True))[1:]  # without warm-up
    ratio = statistics.median(harness / hand for harness, hand in pairs)
    hand, harness = (statistics.median(seconds[kind][1:]) for kind in ("by hand", "harness"))
    print(
        f"{model_name:5}  {layout.n_params:>9,} parameters  by hand {hand:6.2f} s  "
        f"harness {harness:6.2f} s  ratio {ratio:.3f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    for name in ("mlp", "cnn"):
        compare(name, arguments.repeats, arguments.threads)
