"""FedAvg without a framework: index a float tensor, train by SGD with momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from benchmarks._frameworks import RoundServer, Task


def network(task: Task) -> nn.Module:
    """The network as usually written: the CNN with ReLU before pooling."""
    built = task.network()
    if task.model == "cnn":
        layers = [*built.children()]
        for i in [i for i, layer in enumerate(layers) if isinstance(layer, nn.MaxPool2d)]:
            layers[i : i + 2] = layers[i + 1], layers[i]
        built = nn.Sequential(*layers)
    return built


def run(task: Task, server: RoundServer) -> None:
    data, model = task.load(), network(task)
    params = torch.cat([param.flatten() for param in data.start.values()])
    nn.utils.vector_to_parameters(params.clone(), model.parameters())

    def one_round() -> None:
        nonlocal params
        start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        updates = []
        for samples in data.shards:
            model.load_state_dict(start)
            model.train()
            optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=task.momentum)
            shuffled = samples[torch.randperm(len(samples))]
            for batch in shuffled.split(task.batch_size):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(data.x[batch]), data.y[batch])
                loss.backward()
                optimizer.step()
            updates.append(nn.utils.parameters_to_vector(model.parameters()).detach() - params)
        params = params + torch.stack(updates).mean(dim=0)
        nn.utils.vector_to_parameters(params.clone(), model.parameters())

    server.serve(one_round, lambda: params)
