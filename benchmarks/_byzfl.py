"""byzfl (from PyPI): its modules, and its federated training for `peers`.

The package's `__init__` imports torchvision, matplotlib and seaborn for byzfl's own benchmark. Its
aggregators, clients and server need none of them, so we import these without the `__init__`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Subset

from benchmarks._frameworks import N_CLASSES

if TYPE_CHECKING:
    from benchmarks._frameworks import RoundServer, Task


def byzfl(part: str) -> Any:
    """Import byzfl.<part>; None if byzfl is not installed."""
    if "byzfl" not in sys.modules:
        spec = importlib.util.find_spec("byzfl")
        if spec is None:
            return None
        sys.modules["byzfl"] = importlib.util.module_from_spec(spec)  # not executed
    return importlib.import_module(f"byzfl.{part}")


def run(task: Task, server: RoundServer) -> None:
    """FedAvg as in byzfl.benchmark.train: each client has its own DataLoader and model.

    Clients keep their optimizer, and so their momentum, across rounds.
    """
    torch.set_num_threads(task.threads * task.devices)  # byzfl's only way to use several cores
    framework = byzfl("fed_framework")
    framework.models.benchmarked = task.network  # byzfl looks models up by name here
    data = task.load()
    samples = task.samples(data)
    loaders = [
        DataLoader(Subset(samples, shard.tolist()), task.batch_size, shuffle=True)
        for shard in data.shards
    ]
    clients, byzfl_server = _participants(framework, task, loaders)
    byzfl_server.set_model_state(data.start)

    def broadcast() -> None:
        for client in clients:
            client.set_model_state(byzfl_server.get_dict_parameters())

    def one_round() -> None:
        weights = []
        for client, loader in zip(clients, loaders, strict=True):
            client.compute_model_update(len(loader))
            weights.append(client.get_flat_parameters())
        byzfl_server.update_model_with_weights(weights)
        broadcast()

    broadcast()
    server.serve(one_round, byzfl_server.get_flat_parameters)


def _participants(
    framework: Any, task: Task, loaders: list[DataLoader[Any]]
) -> tuple[list[Any], Any]:
    """byzfl's clients and its server."""
    common = {
        "model_name": "benchmarked",
        "device": "cpu",
        "optimizer_name": "SGD",
        "optimizer_params": {"momentum": task.momentum},
        "learning_rate": task.lr,
        "weight_decay": 0.0,
        "milestones": [],
        "learning_rate_decay": 1.0,
    }
    client_only = {"loss_name": "CrossEntropyLoss", "LabelFlipping": False, "nb_labels": N_CLASSES}
    # Momentum of gradients: clients send models, so it has no effect.
    client_only |= {"momentum": 0.0, "store_per_client_metrics": False}
    clients = [
        framework.Client({**common, **client_only, "training_dataloader": loader})
        for loader in loaders
    ]
    rule = {"aggregator_info": {"name": "Average", "parameters": {}}, "pre_agg_list": []}
    return clients, framework.Server({**common, **rule, "test_loader": loaders[0]})
