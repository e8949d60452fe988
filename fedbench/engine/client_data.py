"""What each client trains on: its own samples, augmented, and poisoned if it is malicious."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedbench.attack import ATTACKS, Attack, Poisoning
from fedbench.backdoor import PreparedBackdoor
from fedbench.config import RunConfig
from fedbench.data import Dataset
from fedbench.datasets.partition import client_indices
from fedbench.engine.client_selection import Participant
from fedbench.plugin_answers import checked_samples
from fedbench.rng import generator


class ClientData:
    """The partition of the training set over all clients of the pool."""

    def __init__(
        self, config: RunConfig, dataset: Dataset, attack: Attack, malicious: Sequence[int]
    ) -> None:
        self.config = config
        self.dataset = dataset
        self.attack = attack
        self.malicious = malicious
        self.backdoors: Sequence[PreparedBackdoor] = ()  # set before round 0
        self.shards = client_indices(config, dataset)  # client -> indices of its samples
        before = config.pretraining
        same = before.split == config.split
        self.pretrain_shards = self.shards if same else client_indices(before, dataset)

    def shard(self, index: int, client: int) -> Tensor:
        """Indices of the samples a client trains on in a round."""
        return (self.shards if index >= 0 else self.pretrain_shards)[client]

    def malicious_samples(self) -> Tensor:
        """Indices of the training samples of all malicious clients."""
        shards = [self.shards[client] for client in sorted(self.malicious)]
        found = torch.cat(shards) if shards else torch.zeros(0, dtype=torch.long)
        return found.to(self.dataset.y_train.device)

    def cost(self, index: int, participant: Participant) -> int:
        """Work of a client in a round: the number of samples it processes."""
        n, epochs = len(self.shard(index, participant.client)), self.config.local_epochs
        if not participant.malicious:
            return n * epochs
        attack = self.attack
        own = (attack.training.epochs or epochs) if attack.trains else 0
        return n * (own + epochs * attack.needs_clean_update)

    def samples(self, index: int, client: int, epoch: int, poisoned: bool) -> tuple[Tensor, Tensor]:
        """Raw samples and labels of a client in one epoch of a round.

        Poisoning follows augmentation, which would otherwise move the trigger.
        """
        data, seed = self.dataset, self.config.seed
        key: tuple[int, ...] = (index, client)
        if epoch:  # epoch 0 shares its key with data sets that do not augment
            key = (*key, epoch)
        shard = self.shard(index, client).to(data.y_train.device)
        x, y = data.x_train.index_select(0, shard), data.y_train.index_select(0, shard)
        if data.augment is not None:
            x = data.augment(x, generator(seed, "augment", *key))
        if not poisoned:
            return x, y
        poisoning = Poisoning(
            slot=self.malicious.index(client),
            backdoors=self.backdoors,
            pdr=self.config.pdr_in(index),
            n_classes=data.n_classes,
            rng=generator(seed, "poison", *key),
        )
        answer = self.attack.poison(x, y, poisoning)
        return checked_samples(ATTACKS.label(self.attack), answer, x, y)
