"""PyPI's byzfl: its parts, and its federated training as a side of `peers`.

byzfl's package imports torchvision, matplotlib and seaborn for its own benchmark. Its aggregators,
clients and server do not, so they are imported without the package's `__init__`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Subset

from benchmarks._sides import N_CLASSES

if TYPE_CHECKING:
    from benchmarks._sides import Link, Task


def byzfl(part: str) -> Any:
    """The module byzfl.<part>; None if byzfl is not installed."""
    if "byzfl" not in sys.modules:
        found = importlib.util.find_spec("byzfl")
        if found is None:
            return None
        sys.modules["byzfl"] = importlib.util.module_from_spec(found)  # not executed
    return importlib.import_module(f"byzfl.{part}")


def run(task: Task, link: Link) -> None:
    """FedAvg as byzfl.benchmark.train does it: clients with a data loader and a model each.

    A client keeps its optimizer, and with it the momentum, from round to round.
    """
    torch.set_num_threads(task.threads * task.devices)  # it has no other way to use several cores
    framework = byzfl("fed_framework")
    framework.models.benchmarked = task.network  # byzfl builds models by their name in there
    work = task.load()
    samples = task.samples(work)
    loaders = [
        DataLoader(Subset(samples, shard.tolist()), task.batch_size, shuffle=True)
        for shard in work.shards
    ]
    shared = {
        "model_name": "benchmarked",
        "device": "cpu",
        "optimizer_name": "SGD",
        "optimizer_params": {"momentum": task.momentum},
        "learning_rate": task.lr,
        "weight_decay": 0.0,
        "milestones": [],
        "learning_rate_decay": 1.0,
    }
    own = {"loss_name": "CrossEntropyLoss", "LabelFlipping": False, "nb_labels": N_CLASSES}
    own |= {"momentum": 0.0, "store_per_client_metrics": False}  # of gradients, which go unused
    clients = [framework.Client({**shared, **own, "training_dataloader": it}) for it in loaders]
    rule = {"aggregator_info": {"name": "Average", "parameters": {}}, "pre_agg_list": []}
    server = framework.Server({**shared, **rule, "test_loader": loaders[0]})
    server.set_model_state(work.start)

    def send_out() -> None:
        for client in clients:
            client.set_model_state(server.get_dict_parameters())

    def one_round() -> None:
        weights = []
        for client, loader in zip(clients, loaders, strict=True):
            client.compute_model_update(len(loader))
            weights.append(client.get_flat_parameters())
        server.update_model_with_weights(weights)
        send_out()

    send_out()
    link.serve(one_round, server.get_flat_parameters)
