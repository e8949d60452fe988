"""The ranks of a run: rank 0 sends commands, every rank does its share of the work."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbench.backdoor import PreparedBackdoor
from fedbench.engine.client_runner import ClientRunner
from fedbench.engine.client_selection import Round
from fedbench.engine.executors import Executor
from fedbench.engine.flat_parameters import FlatModel
from fedbench.engine.model_check import described
from fedbench.engine.rank_assignment import balance
from fedbench.engine.rank_context import RankContext
from fedbench.engine.reply_limit import LEAST, ReplyLimit
from fedbench.engine.transport import Link, ended_by_parent, links_in, send_to_rank_0
from fedbench.errors import UserError
from fedbench.metrics import accuracy

Command = tuple[str, tuple[Any, ...]]  # method of RankGroup and its arguments
Groups = list[list[int]]  # clients that are trained together, by position in the round


class ClientError(UserError):
    """A client's training failed; `trace` is the traceback if that was on another rank."""

    def __init__(self, line: str, trace: str | None = None) -> None:
        super().__init__(line)
        if trace is not None:
            self.__cause__ = RuntimeError(trace)


class Reply(NamedTuple):
    """What a rank sends when it has done its share of a command."""

    seconds: float
    result: Any = None
    failure: tuple[str, str] | None = None  # a user error: its line and traceback


class RankGroup:
    """Trains and evaluates on all ranks. Rank 0 calls its methods, the others `serve`."""

    def __init__(self, executor: Executor, rank_context: RankContext) -> None:
        self.rank_context = rank_context
        self.fabric = rank_context.replica.fabric
        self.backend = executor.backend(rank_context.replica, rank_context.config)
        self.runner = ClientRunner(rank_context, self.backend)
        self.links = links_in(self.fabric)
        self.reply_limit = ReplyLimit()
        # Of the clients that were trained last: rows of this rank's (on rank 0, of all), and ranks
        self.results: dict[int, FlatModel] = {}
        self.clients: list[list[int]] = []
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
        participants = round_.participants
        costs = [self.rank_context.data.cost(round_.index, p) for p in participants]
        groups = self.backend.groups(costs, [p.malicious for p in participants])
        group_costs = [sum(costs[i] for i in group) for group in groups]
        parts = balance(group_costs, self._n_ranks())
        parts += [[]] * (self.fabric.world_size - len(parts))
        shares = [[groups[position] for position in part] for part in parts]
        work = [sum(group_costs[position] for position in part) for part in parts]
        rows, *_ = self._on_all_ranks(self._train_share, round_, shares, costs, work=work)
        self._on_all_ranks(self._collect)
        updates, buffers = rows
        return updates, buffers

    def evaluate(self, params: Tensor, buffers: Tensor) -> list[float | None]:
        """Accuracy on each evaluation set: MA, then the BA of each backdoor."""
        n_ranks = self._n_ranks()
        work = [int(rank < n_ranks) for rank in range(self.fabric.world_size)]
        counts = self._on_all_ranks(self._evaluate_share, params, buffers, n_ranks, work=work)
        correct = torch.stack(counts[:n_ranks]).sum(dim=0)
        return [*map(accuracy, self.rank_context.evaluator.sets, correct.tolist())]

    def serve(self) -> None:
        """Do this rank's share of every command until rank 0 stops, or has ended."""
        (link,) = self.links
        with suppress(ConnectionError):
            while (command := link.receive(self.fabric.device)) is not None:
                reply, _ = self._share(*command)
                link.send(reply)

    def stop(self) -> None:
        """End `serve` on the other ranks."""
        for link in self.links:
            with suppress(ConnectionError):  # it has ended already
                link.send(None)

    def _on_all_ranks(
        self, share: Callable[..., Any], *arguments: Any, work: Sequence[int] = ()
    ) -> list[Any]:
        """Results of a method that every rank calls, by rank; raise the failure of any.

        Ranks that have more `work` have more time.
        """
        command: Command = share.__name__, arguments
        with ended_by_parent():
            for link in self.links:
                link.send(command)
        own, failure = self._share(*command)
        work = work or [1] * self.fabric.world_size
        self.reply_limit.note(share.__name__, own.seconds, work[0])
        replies = [own]
        for link, amount in zip(self.links, work[1:], strict=True):
            replies.append(self._receive(link, len(replies), share.__name__, amount))
        if failure is not None:
            raise failure
        for reply in replies:
            if reply.failure is not None:
                raise ClientError(*reply.failure)
        return [reply.result for reply in replies]

    def _share(self, name: str, arguments: tuple[Any, ...]) -> tuple[Reply, UserError | None]:
        """Do this rank's share of a command."""
        start = time.perf_counter()
        try:
            result = getattr(self, name)(*arguments)
        except UserError as error:
            failure = str(error), "".join(traceback.format_exception(error))
            return Reply(time.perf_counter() - start, failure=failure), error
        return Reply(time.perf_counter() - start, result), None

    def _receive(self, link: Link, rank: int, share: str, work: int) -> Reply:
        """A rank's reply, if it comes in time."""
        seconds = self.reply_limit.seconds(share, work)
        if not link.answers_within(seconds):
            raise UserError(
                f"worker process {rank + 1} of {self.fabric.world_size} has not answered for "
                f"{seconds:.0f} s; the same command resumes the run, and {LEAST}=SECONDS lets it "
                "wait longer"
            )
        with ended_by_parent():
            reply: Reply = link.receive(self.fabric.device)
        self.reply_limit.note(share, reply.seconds, work)
        return reply

    def _n_ranks(self) -> int:
        return min(self.available(), self.fabric.world_size)

    def _set_backdoors(self, backdoors: Sequence[PreparedBackdoor]) -> None:
        self.rank_context.set_backdoors(backdoors)

    def _evaluate_share(self, params: Tensor, buffers: Tensor, n_ranks: int) -> Tensor | None:
        rank, evaluator = self.fabric.global_rank, self.rank_context.evaluator
        if rank >= n_ranks:
            return None
        return evaluator.count_correct(params, buffers, rank, n_ranks)

    def _train_share(
        self, round_: Round, shares: Sequence[Groups], costs: Sequence[int]
    ) -> tuple[Tensor, Tensor] | None:
        """Train this rank's clients; return the place of all rows on rank 0."""
        rank = self.fabric.global_rank
        self.clients = [[i for group in groups for i in group] for groups in shares]
        own = range(len(costs)) if rank == 0 else self.clients[rank]
        updates = round_.params.new_empty(len(own), len(round_.params))
        buffers = round_.buffers.new_empty(len(own), len(round_.buffers))
        self.results = dict(zip(own, map(FlatModel, updates, buffers), strict=True))
        for group, share in self._with_progress(shares[rank], costs):
            self._run_group(round_, group, [self.results[i] for i in group])
            if rank == 0:
                self.on_trained(share)
        return (updates, buffers) if rank == 0 else None

    def _collect(self) -> None:
        """Bring the rows of all ranks to rank 0."""
        send_to_rank_0(self.results, self.clients, self.fabric.global_rank, self.links)
        self.results = {}

    @staticmethod
    def _with_progress(
        groups: Groups, costs: Sequence[int]
    ) -> Iterator[tuple[Sequence[int], float]]:
        """The groups of a rank, each with the share of the rank's work that is done after it."""
        work = [sum(costs[i] for i in group) for group in groups]
        for group, done in zip(groups, accumulate(work), strict=True):
            yield group, done / (sum(work) or 1)

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
