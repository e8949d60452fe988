"""The clients: who holds which samples, who is malicious, who takes part, how one trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedbench.attack import Attack, AttackView, Poisoning
from fedbench.backdoors import Backdoor
from fedbench.client import Classifier, train
from fedbench.config import RunConfig, share
from fedbench.data import Dataset
from fedbench.partition import by_dirichlet, by_main_class
from fedbench.rng import derive, generator, numpy_generator
from fedbench.vector import Layout


@dataclass(frozen=True)
class Job:
    """One client's part in a round."""

    client: int
    malicious: bool


@dataclass(frozen=True)
class Order:
    """What the server sends out: who trains, from which model."""

    index: int  # round; rounds of pretraining are negative
    jobs: Sequence[Job]
    params: Tensor  # [P]
    buffers: Tensor  # [Q]


class Population:
    """All clients of a run. Every rank has one and draws the same from it."""

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        network: nn.Module,
        attack: Attack,
        backdoors: Sequence[Backdoor],
        fabric: Fabric,
    ) -> None:
        self.config = config
        self.dataset = dataset
        self.attack = attack
        self.backdoors = backdoors
        self.fabric = fabric
        if not isinstance(network, LightningModule):
            network = Classifier(network, config.lr, config.momentum, config.weight_decay)
        self.module = network
        fabric.to_device(self.module)
        self.layout = Layout(self.module)
        self.shards = _shards(config, dataset)  # client -> indices of its samples
        order = torch.randperm(config.pool_size, generator=generator(config.seed, "malicious"))
        n_malicious = share(config.pmr, config.pool_size)
        self.malicious = order[:n_malicious].tolist()  # a larger pmr adds to those of a smaller
        self.honest = sorted(order[n_malicious:].tolist())

    def select(self, index: int) -> list[Job]:
        """The clients of a round, by id, a share pmr of them malicious.

        The draw does not depend on the attack, so that a benign run meets the same clients.
        """
        n, seed = self.config.n_clients, self.config.seed
        rng = generator(seed, "select", index)
        if index < 0:  # pretraining: nobody has a role yet
            everyone = list(range(self.config.pool_size))
            return [Job(client, malicious=False) for client in sorted(_draw(everyone, n, rng))]
        n_malicious = min(share(self.config.pmr, n), len(self.malicious))
        poisoned = set(_draw(self.malicious, n_malicious, rng))
        honest = _draw(self.honest, n - n_malicious, rng)
        attacked = self.attack.active and index >= self.config.attack_start  # honest until then
        return [
            Job(client, malicious=attacked and client in poisoned)
            for client in sorted([*poisoned, *honest])
        ]

    def train(self, order: Order, job: Job) -> None:
        """Trains the module, which holds the global model, as this client would."""
        config, data = self.config, self.dataset
        key = (order.index, job.client)
        samples = self.shards[job.client]
        x, y = data.x_train[samples], data.y_train[samples]
        rng = generator(config.seed, "batches", *key)
        torch.manual_seed(derive(config.seed, "layers", *key))  # dropout and the like
        if not job.malicious:
            train(
                self.module,
                data.decode(x),
                y,
                self.fabric,
                epochs=config.local_epochs,
                batch_size=config.batch_size,
                rng=rng,
            )
            return
        poisoning = Poisoning(
            slot=self.malicious.index(job.client),
            backdoors=self.backdoors,
            pdr=config.pdr,
            rng=generator(config.seed, "poison", *key),
        )
        x, y = self.attack.poison(x, y, poisoning)
        view = self.attack_view(order, generator(config.seed, "objective", *key))
        train(
            self.module,
            data.decode(x),
            y,
            self.fabric,
            epochs=self.attack.epochs or config.local_epochs,
            batch_size=config.batch_size,
            rng=rng,
            lr=self.attack.lr,
            objective=lambda loss: self.attack.objective(loss, self.layout.params, view),
        )

    def attack_view(self, order: Order, rng: torch.Generator) -> AttackView:
        return AttackView(
            index=order.index,
            global_params=order.params,
            layers=self.layout.layers,
            n_clients=len(order.jobs),
            n_malicious=sum(job.malicious for job in order.jobs),
            server_lr=self.config.server_lr,
            rng=rng,
        )


def _draw(items: Sequence[int], n: int, rng: torch.Generator) -> list[int]:
    return [items[i] for i in torch.randperm(len(items), generator=rng)[:n].tolist()]


def _shards(config: RunConfig, dataset: Dataset) -> list[Tensor]:
    rng = numpy_generator(config.seed, "partition")
    if config.partition == "dirichlet":
        return by_dirichlet(dataset.y_train, config.pool_size, config.dirichlet_alpha, rng)
    return by_main_class(dataset.y_train, config.pool_size, config.non_iid, rng)
