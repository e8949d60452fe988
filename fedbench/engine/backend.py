"""Backend: how an executor trains clients on one rank; sequential and vectorized implement it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from fedbench.engine.local_training import LocalTraining
from fedbench.engine.parameters import FlatModel
from fedbench.engine.replica import ModelReplica


class Backend(ABC):
    """Trains clients on one rank's replica. One object serves all rounds."""

    name: ClassVar[str]  # the executor's

    def __init__(self, replica: ModelReplica) -> None:
        self.replica = replica

    @abstractmethod
    def groups(self, costs: Sequence[int], malicious: Sequence[bool]) -> list[list[int]]:
        """Which of a round's clients are trained together, by position.

        Groups must not depend on the number of ranks: results would depend on it, too.
        """

    @abstractmethod
    def fit(
        self, start: FlatModel, trainings: Sequence[LocalTraining], out: Sequence[FlatModel]
    ) -> None:
        """Train the clients of a group from `start`, each into its entry of `out`."""
