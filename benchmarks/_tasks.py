"""Prepares the task that all frameworks do, and scores the models they return."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks._fedbench import CONFIG, dataset_file, rank_group, thinned
from benchmarks._frameworks import NETWORKS, Task, TaskData
from fedbench.data import DATASETS, Dataset, Images
from fedbench.datasets.files import cache_folder, data_folders, find_files
from fedbench.datasets.images import FashionMnist


def load_dataset(quick: bool) -> Dataset:
    """Load Fashion-MNIST if it is on this machine, or else the shipped sample. No downloads."""
    if quick:
        return thinned(DATASETS.build({"name": "fmnist_sample"}).load(), 20)
    assert FashionMnist.package is not None
    name = FashionMnist.spec.name
    packaged = map(Path, FashionMnist.package.folders)
    for folder in (*data_folders(name), *packaged, cache_folder(name)):
        if not find_files(folder, FashionMnist.names)[1]:
            return FashionMnist(root=str(folder)).load()
    return DATASETS.build({"name": "fmnist_sample"}).load()


def prepare_task(model: str, data: Dataset, folder: Path, threads: int) -> Task:
    """Return a task; write its samples and initial model to `folder`."""
    ranks, round_ = rank_group(data, NETWORKS[model], "auto", threads)
    task = Task(
        file=str(folder / "task.pt"),
        model=model,
        n_clients=len(round_.participants),
        batch_size=CONFIG.batch_size,
        lr=CONFIG.lr,
        momentum=CONFIG.momentum,
        threads=threads,
    )
    shards = ranks.rank_context.data.shards
    # fedbench merges a single left-over sample into the batch before it. The others do not, and
    # would take one more step.
    assert all(len(shard) % task.batch_size != 1 for shard in shards)
    start = network_with(task, round_.params).state_dict()
    assert isinstance(data, Images)
    x = data.decode(data.x_train)
    task.save(TaskData(x, data.x_train, data.mean, data.std, data.y_train, shards, start))
    torch.save(data, dataset_file(task))
    return task


def network_with(task: Task, params: Tensor) -> nn.Module:
    network = task.network()
    nn.utils.vector_to_parameters(params, network.parameters())
    return network


@torch.no_grad()
def accuracy(task: Task, params: Tensor, data: Dataset) -> float:
    """Test accuracy of the model with these parameters."""
    network = network_with(task, params).eval()
    correct = [
        network(data.decode(x)).argmax(1) == y
        for x, y in zip(data.x_test.split(1000), data.y_test.split(1000), strict=True)
    ]
    return float(torch.cat(correct).float().mean())
