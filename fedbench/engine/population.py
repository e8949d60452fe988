"""The clients: who holds which samples, who is malicious, who takes part, how one trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedbench.attack import Attack, AttackView, Poisoning
from fedbench.backdoor import BackdoorContext, PreparedBackdoor
from fedbench.config import RunConfig, rounded_count
from fedbench.data import Dataset
from fedbench.datasets.partition import shards_of
from fedbench.engine.local_training import AttackHooks, Classifier, Training
from fedbench.engine.parameters import ParameterLayout
from fedbench.errors import UserError
from fedbench.metrics import BATCH, EvaluationSet, batch_size, count_right
from fedbench.rng import derive, generator


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


class Rows(NamedTuple):
    """Where what comes of a client's training goes."""

    params: Tensor  # [P]
    buffers: Tensor  # [Q]


# Trains clients, each from the global model; its parameters and buffers go to its rows.
Fit = Callable[[Sequence[Training], Sequence[Rows]], None]


class Population:
    """All clients of a run. Every rank has one and draws the same from it."""

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        network: nn.Module,
        attack: Attack,
        fabric: Fabric,
    ) -> None:
        self.config = config
        self.dataset = dataset
        self.attack = attack
        self.backdoors: Sequence[PreparedBackdoor] = ()  # ready before round 0
        self.clean = EvaluationSet(dataset.x_test, dataset.y_test)
        self.triggered: list[EvaluationSet] = []
        self.fabric = fabric
        if not isinstance(network, LightningModule):
            network = Classifier(network, config.lr, config.momentum, config.weight_decay)
        self.module = network
        fabric.to_device(self.module)
        self.layout = ParameterLayout(self.module)
        self.shards = shards_of(config, dataset)  # client -> indices of its samples
        before = config.pretraining
        same = before.split == config.split
        self.pretrain_shards = self.shards if same else shards_of(before, dataset)
        order = torch.randperm(config.pool_size, generator=generator(config.seed, "malicious"))
        n_malicious = rounded_count(config.pmr, config.pool_size)
        self.malicious = order[:n_malicious].tolist()  # a larger pmr adds to those of a smaller
        self.honest = sorted(order[n_malicious:].tolist())

    def select(self, index: int) -> list[Job]:
        """The clients of a round, by id, a share pmr of them malicious.

        The draw does not depend on the attack, so that a benign run meets the same clients.
        """
        n = self.config.n_clients_in(index)
        rng = generator(self.config.seed, "select", index)
        if index < 0:  # pretraining: nobody has a role yet
            everyone = list(range(self.config.pool_size))
            return [Job(client, malicious=False) for client in sorted(_draw(everyone, n, rng))]
        if self.config.malicious == "sampled":
            clients = _draw(range(self.config.pool_size), n, rng)
        else:
            n_malicious = min(rounded_count(self.config.pmr, n), len(self.malicious))
            clients = _draw(self.malicious, n_malicious, rng)
            clients += _draw(self.honest, n - n_malicious, rng)
        attacked = self.attack.active and self.config.attacked_in(index)
        attackers = set(self.malicious) if attacked else set()  # else all are honest
        return [Job(client, client in attackers) for client in sorted(clients)]

    def backdoor_context(self, params: Tensor, buffers: Tensor) -> BackdoorContext:
        """What a backdoor can be made of, with the model that stands before round 0."""
        shards = [self.shards[client] for client in sorted(self.malicious)]
        own = torch.cat(shards) if shards else torch.zeros(0, dtype=torch.long)

        def features(x: Tensor) -> Tensor:
            self.layout.write(params, buffers)
            return _features(self.module, self.dataset, x)

        return BackdoorContext(self.dataset, own.to(self.dataset.y_train.device), features)

    def brief(self, backdoors: Sequence[PreparedBackdoor]) -> None:
        """Gives the malicious clients their backdoors, and what BA is measured on."""
        data = self.dataset
        self.backdoors = backdoors
        self.triggered = [
            backdoor.evaluation_set(data.x_test, data.y_test) for backdoor in backdoors
        ]

    def held(self, order: Order, job: Job) -> Tensor:
        """The indices of the samples that a client trains on in a round."""
        return (self.shards if order.index >= 0 else self.pretrain_shards)[job.client]

    def cost(self, order: Order, job: Job) -> int:
        """How much work a client's training is: the samples that it goes through."""
        n, epochs = len(self.held(order, job)), self.config.local_epochs
        if not job.malicious:
            return n * epochs
        attack = self.attack
        own = (attack.training.epochs or epochs) if attack.trains else 0
        return n * (own + epochs * attack.needs_clean_update)

    def train(self, order: Order, jobs: Sequence[Job], out: Sequence[Rows], fit: Fit) -> None:
        """Trains clients from the global model; `out` gets their updates and buffers."""
        attack = self.attack
        views = {
            i: self.attack_view(order, generator(self.config.seed, "objective", *_key(order, job)))
            for i, job in enumerate(jobs)
            if job.malicious
        }
        if attack.needs_clean_update and views:
            clean = [Rows(*map(torch.empty_like, (out[i].params, out[i].buffers))) for i in views]
            fit([self._training(order, jobs[i]) for i in views], clean)
            for i, rows in zip(views, clean, strict=True):
                views[i] = replace(views[i], clean_update=rows.params.sub_(order.params))
        trained = [i for i, job in enumerate(jobs) if attack.trains or not job.malicious]
        for i in {*range(len(jobs))} - {*trained}:
            out[i].params.copy_(order.params)
            out[i].buffers.copy_(order.buffers)
        trainings = [self._training(order, jobs[i], views.get(i)) for i in trained]
        fit(trainings, [out[i] for i in trained])
        for rows in out:
            rows.params.sub_(order.params)
        for i, view in views.items():
            self._craft(out[i].params, view)

    def _craft(self, update: Tensor, view: AttackView) -> None:
        sent = self.attack.craft(update, view)
        if sent.shape != update.shape:
            shapes = f"{tuple(update.shape)}, got {tuple(sent.shape)}"
            raise UserError(f"craft must return an update of shape {shapes}")
        update.copy_(sent)

    def _training(self, order: Order, job: Job, view: AttackView | None = None) -> Training:
        """A client's training: honest or, with a view, as the attack has it."""
        config, data, attack = self.config, self.dataset, self.attack
        key = _key(order, job)
        epochs, malice = config.local_epochs, None
        if view is not None:
            epochs = attack.training.epochs or epochs
            malice = AttackHooks(
                attack.training,
                objective=lambda loss, params: attack.objective(loss, params, view),
                project=lambda params: attack.project(params, view),
            )

        @lru_cache(maxsize=1)
        def read(epoch: int) -> tuple[Tensor, Tensor]:
            return self._samples(order, job, epoch, poisoned=view is not None)

        return Training(
            samples=lambda epoch: read(epoch if data.augment else 0),
            epochs=epochs,
            batch_size=config.batch_size,
            rng=generator(config.seed, "batches", *key),
            decode=data.decode,
            seed=derive(config.seed, "layers", *key),
            malice=malice,
        )

    def count_right(self, params: Tensor, buffers: Tensor, part: int, n_parts: int) -> Tensor:
        """Of every probe, MA's first, the right predictions in a part of its batches: [probes]."""
        data = self.dataset
        self.layout.write(params, buffers)
        counts = []
        for probe in self.probes:
            size = batch_size(probe, data.n_classes)
            batches = range(part * size, len(probe.x), n_parts * size)
            with self.fabric.autocast():
                counts.append(
                    count_right(self.module, probe, data.decode, data.threshold, batches, size)
                )
        return torch.stack(counts)

    @property
    def probes(self) -> list[EvaluationSet]:
        """What MA is measured on, then each backdoor's BA."""
        return [self.clean, *self.triggered]

    def _samples(self, order: Order, job: Job, epoch: int, poisoned: bool) -> tuple[Tensor, Tensor]:
        """A client's raw samples and labels in an epoch.

        They are poisoned after they are augmented, since a trigger must stay where it is.
        """
        data, seed, key = self.dataset, self.config.seed, _key(order, job)
        if epoch:  # the first has the key of data sets that are the same in every epoch
            key = (*key, epoch)
        held = self.held(order, job).to(data.y_train.device)
        x, y = data.x_train.index_select(0, held), data.y_train.index_select(0, held)
        if data.augment is not None:
            x = data.augment(x, generator(seed, "augment", *key))
        if not poisoned:
            return x, y
        poisoning = Poisoning(
            slot=self.malicious.index(job.client),
            backdoors=self.backdoors,
            pdr=self.config.pdr_in(order.index),
            n_classes=data.n_classes,
            rng=generator(seed, "poison", *key),
        )
        return self.attack.poison(x, y, poisoning)

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


def _key(order: Order, job: Job) -> tuple[int, ...]:
    """What a client's draws in a round depend on, beside the seed and their purpose."""
    return order.index, job.client


@torch.no_grad()
def _features(module: nn.Module, dataset: Dataset, x: Tensor) -> Tensor:
    """What the last linear layer reads for raw samples [n, ...]: [n, F]."""
    read: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
        for layer in module.modules()
        if isinstance(layer, nn.Linear)
    ]
    features = []
    module.eval()
    try:
        for batch in x.split(BATCH):
            read.clear()
            module(dataset.decode(batch))
            features += read[-1:]  # of the layer that was called last
    finally:
        for hook in hooks:
            hook.remove()
    if not features or [len(part) for part in features] != [len(part) for part in x.split(BATCH)]:
        raise UserError("features are what the last linear layer reads of each sample, none found")
    return torch.cat(features)


def _draw(items: Sequence[int], n: int, rng: torch.Generator) -> list[int]:
    return [items[i] for i in torch.randperm(len(items), generator=rng)[:n].tolist()]
