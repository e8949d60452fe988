"""Flower's simulation (flwr from PyPI), as in its PyTorch quickstart, for `peers`.

Ray runs the clients in `task.devices` processes with `task.threads` CPUs each. The server has a
process of its own.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from benchmarks._frameworks import Task, TaskData

if TYPE_CHECKING:
    from benchmarks._frameworks import RoundServer

client_app = ClientApp()


@cache
def load_once(task: Task) -> TaskData:
    """Load the task's data once per client process."""
    torch.set_num_threads(task.threads)
    return task.load()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train one client for one round."""
    task = Task(**json.loads(message.content["config"]["task"]))
    model = task.network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    data = load_once(task)
    shard = data.shards[context.node_config["partition-id"]]
    samples = Subset(task.samples(data), shard.tolist())
    loss = fit(model, DataLoader(samples, task.batch_size, shuffle=True), task)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(samples)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


def fit(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], task: Task) -> float:
    """Train for one epoch; return the mean loss."""
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=task.momentum)
    model.train()
    total = 0.0
    for images, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


def run(task: Task, server: RoundServer) -> None:
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        arrays = ArrayRecord(task.load().start)
        strategy = FedAvg(
            fraction_evaluate=0.0,
            min_train_nodes=task.n_clients,
            min_available_nodes=task.n_clients,
            train_metrics_aggr_fn=lambda replies, _: MetricRecord({"clients": len(replies)}),
        )

        def one_round() -> None:
            nonlocal arrays
            config = ConfigRecord({"task": json.dumps(asdict(task))})
            result = strategy.start(grid, arrays, num_rounds=1, train_config=config)
            n = result.train_metrics_clientapp[1]["clients"]
            # Flower continues without clients that fail.
            assert n == task.n_clients, f"{n} of {task.n_clients} clients replied"
            arrays = result.arrays

        def params() -> Tensor:
            return torch.cat([tensor.flatten() for tensor in arrays.to_torch_state_dict().values()])

        server.serve(one_round, params)

    per_client, total = ({"num_cpus": task.threads * n} for n in (1, task.devices))
    local = {"_node_ip_address": "127.0.0.1"}  # keeps Ray off the network
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=task.n_clients,
        backend_config={"client_resources": per_client, "init_args": total | local},
    )
