"""The ranks of a run: rank 0 sends commands, every rank does its share of the work."""

from __future__ import annotations

import io
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from fedbench.backdoor import PreparedBackdoor
from fedbench.engine.client_runner import ClientRunner
from fedbench.engine.client_selection import Round
from fedbench.engine.executors import Executor
from fedbench.engine.flat_parameters import FlatModel
from fedbench.engine.model_check import described
from fedbench.engine.rank_assignment import balance
from fedbench.engine.rank_context import RankContext
from fedbench.engine.transport import collective, send_to_rank_0
from fedbench.errors import UserError
from fedbench.metrics import accuracy

T = TypeVar("T")
Command = tuple[str, tuple[Any, ...]] | None  # method of RankGroup and its arguments; None: stop


class ClientError(UserError):
    """A client's training failed; `trace` is the traceback if that was on another rank."""

    def __init__(self, line: str, trace: str | None = None) -> None:
        super().__init__(line)
        if trace is not None:
            self.__cause__ = RuntimeError(trace)


class RankGroup:
    """Trains and evaluates on all ranks. Rank 0 calls its methods, the others `serve`."""

    def __init__(self, executor: Executor, rank_context: RankContext) -> None:
        self.rank_context = rank_context
        self.fabric = rank_context.replica.fabric
        self.backend = executor.backend(rank_context.replica, rank_context.config)
        self.runner = ClientRunner(rank_context, self.backend)
        # Ranks that may work now; a sweep changes it as other runs end.
        self.available: Callable[[], int] = lambda: self.fabric.world_size
        # Called on rank 0 after each of its groups with the share of its work that is done. All
        # ranks have about the same amount of work, so this is also the share of the round.
        self.on_trained: Callable[[float], None] = lambda share: None

    def __str__(self) -> str:
        """`sequential on 2 processes`: the choice that the first line of a run shows."""
        where = self.fabric.device.type
        kind = "process" if where == "cpu" else f"{where} device"
        n = self.fabric.world_size
        plural = ("es" if where == "cpu" else "s") * (n > 1)
        return f"{self.backend} on {n} {kind}{plural}"

    def set_backdoors(self, backdoors: Sequence[PreparedBackdoor]) -> None:
        self._on_all_ranks(self._set_backdoors, tuple(backdoors))

    def train(self, round_: Round) -> tuple[Tensor, Tensor]:
        """Updates [N, P] and buffers [N, Q] of the participants, in their order."""
        return self._on_all_ranks(self._train_share, round_, self._n_ranks())

    def evaluate(self, params: Tensor, buffers: Tensor) -> list[float | None]:
        """Accuracy on each evaluation set: MA, then the BA of each backdoor."""
        counts = self._on_all_ranks(self._evaluate_share, params, buffers, self._n_ranks())
        return [*map(accuracy, self.rank_context.evaluator.sets, counts.tolist())]

    def serve(self) -> None:
        """Do this rank's share of every command until rank 0 stops."""
        while (command := self._broadcast(None)) is not None:
            name, arguments = command
            with suppress(UserError):  # rank 0 raises and reports it
                getattr(self, name)(*arguments)

    def stop(self) -> None:
        """End `serve` on the other ranks."""
        self._broadcast(None)

    def _on_all_ranks(self, share: Callable[..., T], *arguments: Any) -> T:
        """Rank 0's result of a method that every rank calls."""
        self._broadcast((share.__name__, arguments))
        return share(*arguments)

    def _n_ranks(self) -> int:
        return min(self.available(), self.fabric.world_size)

    def _broadcast(self, command: Command) -> Command:
        """Rank 0's command, on every rank and its device."""
        if self.fabric.world_size == 1:
            return command
        packed = io.BytesIO()
        if self.fabric.global_rank == 0:
            torch.save(command, packed)
        with collective():
            sent = io.BytesIO(self.fabric.broadcast(packed.getvalue()))
        if self.fabric.global_rank == 0:
            return command
        received: Command = torch.load(sent, map_location=self.fabric.device, weights_only=False)
        return received

    def _set_backdoors(self, backdoors: Sequence[PreparedBackdoor]) -> None:
        self.rank_context.set_backdoors(backdoors)

    def _evaluate_share(self, params: Tensor, buffers: Tensor, n_ranks: int) -> Tensor:
        rank, evaluator = self.fabric.global_rank, self.rank_context.evaluator
        if rank < n_ranks:
            counts = evaluator.count_correct(params, buffers, rank, n_ranks)
        else:
            counts = torch.zeros(len(evaluator.sets), dtype=torch.long, device=self.fabric.device)
        if self.fabric.world_size > 1:
            with collective():
                distributed.all_reduce(counts)
        return counts

    def _train_share(self, round_: Round, n_ranks: int) -> tuple[Tensor, Tensor]:
        """Train this rank's clients; the result is complete on rank 0 only."""
        rank, participants = self.fabric.global_rank, round_.participants
        costs = [self.rank_context.data.cost(round_.index, p) for p in participants]
        groups = self.backend.groups(costs, [p.malicious for p in participants])
        parts = balance([sum(costs[i] for i in group) for group in groups], n_ranks)
        parts += [[]] * (self.fabric.world_size - n_ranks)
        clients = [[i for position in part for i in groups[position]] for part in parts]
        own = range(len(participants)) if rank == 0 else clients[rank]
        updates = round_.params.new_empty(len(own), len(round_.params))
        buffers = round_.buffers.new_empty(len(own), len(round_.buffers))
        results = dict(zip(own, map(FlatModel, updates, buffers), strict=True))
        failure: UserError | None = None
        try:
            for group, share in self._with_progress(groups, parts[rank], costs):
                self._run_group(round_, group, [results[i] for i in group])
                if rank == 0:
                    self.on_trained(share)
        except UserError as error:
            failure = error
        self._raise_anywhere(failure)
        send_to_rank_0(results, clients, rank)
        return updates, buffers

    @staticmethod
    def _with_progress(
        groups: Sequence[Sequence[int]], positions: Sequence[int], costs: Sequence[int]
    ) -> Iterator[tuple[Sequence[int], float]]:
        """The groups of a rank, each with the share of the rank's work that is done after it."""
        work = [sum(costs[i] for i in groups[position]) for position in positions]
        for position, done in zip(positions, accumulate(work), strict=True):
            yield groups[position], done / (sum(work) or 1)

    def _run_group(self, round_: Round, group: Sequence[int], rows: Sequence[FlatModel]) -> None:
        participants = [round_.participants[i] for i in group]
        try:
            self.runner.run(round_, participants, rows)
        except UserError:
            raise
        except Exception as error:
            who = ", ".join(str(participant.client) for participant in participants)
            reason = described(error, self.rank_context.replica.module)
            when = "pretraining" if round_.index < 0 else f"round {round_.index}"
            raise ClientError(f"client {who} in {when}: {reason}") from error

    def _raise_anywhere(self, failure: UserError | None) -> None:
        """Raise any rank's failure on all ranks, so that none waits for another."""
        ranks = self.fabric.world_size
        if ranks > 1:
            n_failures = torch.tensor(int(failure is not None), device=self.fabric.device)
            with collective():
                distributed.all_reduce(n_failures)
            if n_failures:
                mine = failure and (str(failure), "".join(traceback.format_exception(failure)))
                reports: list[tuple[str, str] | None] = [None] * ranks
                with collective():
                    distributed.all_gather_object(reports, mine)
                line, trace = next(filter(None, reports))
                failure = failure or ClientError(line, trace)
        if failure is not None:
            raise failure
