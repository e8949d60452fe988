"""How the results of clients reach rank 0 from the ranks that trained them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from lightning.fabric import Fabric
from torch import Tensor, distributed

from fedbench.engine.collective import collective
from fedbench.engine.parameters import FlatModel
from fedbench.engine.shared_memory import SharedMemory


class Transport(ABC):
    """Rank 0 writes results in place; other ranks write where `slot` says."""

    def __init__(self, fabric: Fabric) -> None:
        self.rank = fabric.global_rank

    @abstractmethod
    def slot(self, client: int) -> FlatModel:
        """Where ranks other than 0 write the result of a client, by position in the round."""

    @abstractmethod
    def collect(self, out: Sequence[FlatModel], trained: set[int], n_clients: int) -> None:
        """Copy the other ranks' results to `out` on rank 0; `trained` are this rank's clients.

        Every rank calls this after all of them have finished training. `out` is empty on the others.
        """


class ProcessGroupTransport(Transport):
    """Sends results through torch's process group."""

    def __init__(self, fabric: Fabric, like: FlatModel) -> None:
        super().__init__(fabric)
        self.n_ranks = fabric.world_size
        self.like = like
        self._slots: dict[int, FlatModel] = {}

    def slot(self, client: int) -> FlatModel:
        if client not in self._slots:
            self._slots[client] = FlatModel(*map(torch.empty_like, self.like))
        return self._slots[client]

    def collect(self, out: Sequence[FlatModel], trained: set[int], n_clients: int) -> None:
        if self.n_ranks == 1:
            return
        senders = torch.zeros(n_clients, dtype=torch.int64, device=self.like.params.device)
        senders[[*trained]] = self.rank
        with collective():
            distributed.all_reduce(senders)
        for client, sender in enumerate(senders.tolist()):
            if sender > 0 and self.rank in (0, sender):
                for part in out[client] if self.rank == 0 else self._slots.pop(client):
                    self._send_to_rank_0(part, sender)

    def _send_to_rank_0(self, part: Tensor, sender: int) -> None:
        if not part.numel():
            return
        with collective():
            if self.rank == 0:
                distributed.recv(part, src=sender)
            else:
                distributed.send(part, dst=0)


class SharedMemoryTransport(Transport):
    """Ranks write results into memory that rank 0 reads."""

    def __init__(self, fabric: Fabric, like: FlatModel, max_clients: int) -> None:
        super().__init__(fabric)
        sizes = [part.numel() for part in like]
        n_bytes = max_clients * sum(sizes) * like.params.element_size()
        self._memory = SharedMemory(fabric, n_bytes)
        values = torch.frombuffer(self._memory.buffer, dtype=like.params.dtype)
        self._slots = [FlatModel(*row.split(sizes)) for row in values.view(max_clients, -1)]

    def slot(self, client: int) -> FlatModel:
        return self._slots[client]

    def collect(self, out: Sequence[FlatModel], trained: set[int], n_clients: int) -> None:
        if self.rank > 0:
            return
        for client in {*range(n_clients)} - trained:
            for part, sent in zip(out[client], self._slots[client], strict=True):
                part.copy_(sent)
