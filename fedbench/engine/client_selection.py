"""Which clients take part in a round, and which of them are malicious."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.config import RunConfig, rounded_count
from fedbench.engine.flat_parameters import FlatModel
from fedbench.rng import generator


@dataclass(frozen=True)
class Participant:
    """A client that takes part in a round."""

    client: int  # id, stable across rounds
    malicious: bool  # whether it attacks in this round


@dataclass(frozen=True)
class Round:
    """What the server sends out: who trains, and from which global model."""

    index: int  # pretraining rounds are negative
    participants: Sequence[Participant]
    params: Tensor  # [P]
    buffers: Tensor  # [Q]

    @property
    def model(self) -> FlatModel:
        return FlatModel(self.params, self.buffers)

    @property
    def n_malicious(self) -> int:
        return len(malicious_positions(self.participants))


class Selection:
    """Draws roles once per run and participants once per round, from the seed alone."""

    def __init__(self, config: RunConfig, attack_active: bool) -> None:
        self.config = config
        self.attack_active = attack_active
        order = torch.randperm(config.pool_size, generator=generator(config.seed, "malicious"))
        n_malicious = rounded_count(config.pmr, config.pool_size)
        self.malicious = order[:n_malicious].tolist()  # a larger pmr only adds clients
        self.honest = sorted(order[n_malicious:].tolist())

    def select(self, index: int) -> list[Participant]:
        """Participants of a round, sorted by id.

        The draw ignores the attack, so that a benign run meets the same clients.
        """
        config = self.config
        n = config.n_clients_in(index)
        rng = generator(config.seed, "select", index)
        if index < 0:  # pretraining: nobody is malicious yet
            clients = _draw(range(config.pool_size), n, rng)
            return [Participant(client, malicious=False) for client in sorted(clients)]
        if config.malicious == "sampled":
            clients = _draw(range(config.pool_size), n, rng)
        else:
            n_malicious = min(rounded_count(config.pmr, n), len(self.malicious))
            clients = _draw(self.malicious, n_malicious, rng)
            clients += _draw(self.honest, n - n_malicious, rng)
        attacked = self.attack_active and config.attacked_in(index)
        attackers = set(self.malicious) if attacked else set()
        return [Participant(client, client in attackers) for client in sorted(clients)]


def malicious_positions(participants: Sequence[Participant]) -> list[int]:
    return [i for i, participant in enumerate(participants) if participant.malicious]


def _draw(clients: Sequence[int], n: int, rng: torch.Generator) -> list[int]:
    return [clients[i] for i in torch.randperm(len(clients), generator=rng)[:n].tolist()]
