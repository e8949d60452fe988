"""The ranks of a run: what rank 0 asks of them, and what they make of it."""

from __future__ import annotations

import io
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from lightning.fabric import Fabric
from torch import Tensor, distributed

from fedbench.backdoor import PreparedBackdoor
from fedbench.engine.executors import Executor
from fedbench.engine.population import Order, Population, Rows
from fedbench.engine.transport import Board, Channel, Line, together
from fedbench.errors import UserError
from fedbench.metrics import accuracy


@dataclass(frozen=True)
class Briefing:
    """The backdoors, made ready."""

    backdoors: Sequence[PreparedBackdoor]


@dataclass(frozen=True)
class Course:
    """An order, and how many ranks take part."""

    order: Order
    n_ranks: int


@dataclass(frozen=True)
class Exam:
    """A model to be measured, and by how many ranks."""

    params: Tensor  # [P]
    buffers: Tensor  # [Q]
    n_ranks: int


Message = Course | Briefing | Exam | None  # none: there is nothing more to do


class ClientError(UserError):
    """What went wrong in a client's training; with the trace, if that was on another rank."""

    def __init__(self, line: str, trace: str | None = None) -> None:
        super().__init__(line)
        if trace is not None:
            self.__cause__ = RuntimeError(trace)


class RankGroup:
    """The ranks of a run: rank 0 is the server's and gives orders, the others serve."""

    def __init__(self, executor: Executor, fabric: Fabric, population: Population) -> None:
        self.trainer = executor.trainer(population)
        self.fabric = fabric
        self.population = population
        self.room: Callable[[], int] = lambda: fabric.world_size  # ranks that may work now
        self._channel: Channel | None = None  # made for the first order

    def __str__(self) -> str:
        """`sequential on 2 processes`: what was chosen, for people."""
        where = self.fabric.device.type
        kind = "process" if where == "cpu" else f"{where} device"
        n = self.fabric.world_size
        plural = ("es" if where == "cpu" else "s") * (n > 1)
        return f"{self.trainer.name} on {n} {kind}{plural}"

    def brief(self, backdoors: Sequence[PreparedBackdoor]) -> None:
        """Gives every rank the backdoors that are made ready."""
        self._exchange(Briefing(tuple(backdoors)))
        self.population.brief(backdoors)

    def train(self, order: Order) -> tuple[Tensor, Tensor]:
        """Updates [N, P] and buffers [N, Q] of the order's clients, in the order of its jobs."""
        course = Course(order, self._n_ranks())
        self._exchange(course)
        return self._train_share(course)

    def evaluate(self, params: Tensor, buffers: Tensor) -> list[float | None]:
        """Of every probe of the population, the share of right predictions."""
        exam = Exam(params, buffers, self._n_ranks())
        self._exchange(exam)
        counts = self._evaluate_share(exam)
        return [*map(accuracy, self.population.probes, counts.tolist())]

    def serve(self) -> None:
        """Does this rank's share of all that the server asks for, until it sends nothing."""
        while (message := self._exchange(None)) is not None:
            if isinstance(message, Briefing):
                self.population.brief(message.backdoors)
            elif isinstance(message, Exam):
                self._evaluate_share(message)
            else:
                with suppress(UserError):  # rank 0 has it too, and tells it
                    self._train_share(message)

    def _n_ranks(self) -> int:
        return min(self.room(), self.fabric.world_size)

    def dismiss(self) -> None:
        """Ends `serve`."""
        self._exchange(None)

    def _exchange(self, message: Message) -> Message:
        """What rank 0 holds, on every rank and there on its device."""
        if self.fabric.world_size == 1:
            return message
        packed = io.BytesIO()
        if self.fabric.global_rank == 0:
            torch.save(message, packed)
        with together():
            sent = io.BytesIO(self.fabric.broadcast(packed.getvalue()))
        if self.fabric.global_rank == 0:
            return message
        received: Message = torch.load(sent, map_location=self.fabric.device, weights_only=False)
        return received

    def _evaluate_share(self, exam: Exam) -> Tensor:
        ranks, rank = self.fabric.world_size, self.fabric.global_rank
        population, n_probes = self.population, len(self.population.probes)
        if rank < exam.n_ranks:
            counts = population.count_right(exam.params, exam.buffers, rank, exam.n_ranks)
        else:
            counts = torch.zeros(n_probes, dtype=torch.long, device=self.fabric.device)
        if ranks > 1:
            with together():
                distributed.all_reduce(counts)
        return counts

    def _train_share(self, course: Course) -> tuple[Tensor, Tensor]:
        """Rank 0 gets all rows, the others none."""
        order, layout, rank = course.order, self.population.layout, self.fabric.global_rank
        n_rows = len(order.jobs) if rank == 0 else 0
        updates = order.params.new_empty(n_rows, layout.n_params)
        buffers = order.buffers.new_empty(n_rows, layout.n_buffers)
        out = [Rows(*row) for row in zip(updates, buffers, strict=True)]
        portions = self.trainer.portions(order)
        costs = [sum(self.population.cost(order, order.jobs[i]) for i in p) for p in portions]
        channel = self._channel_like(Rows(order.params, order.buffers))
        failure: UserError | None = None
        try:
            for place in channel.deal(portions, costs, course.n_ranks):
                portion = portions[place]
                rows = [out[i] if rank == 0 else channel.place(i) for i in portion]
                self._train_portion(order, portion, rows)
        except UserError as error:
            failure = error
        self._raise_any(failure)
        channel.collect(out)
        return updates, buffers

    def _channel_like(self, like: Rows) -> Channel:
        """One for all rounds, with room for the most clients that a round may have."""
        if self._channel is None:
            most = self.population.config.most_clients
            shared = Board.suits(self.fabric)
            self._channel = Board(self.fabric, like, most) if shared else Line(self.fabric, like)
        return self._channel

    def _train_portion(self, order: Order, portion: Sequence[int], rows: Sequence[Rows]) -> None:
        population, jobs = self.population, [order.jobs[i] for i in portion]

        try:
            population.train(order, jobs, rows, partial(self.trainer.fit, order))
        except UserError:
            raise
        except Exception as error:
            who = ", ".join(str(job.client) for job in jobs)
            reason = f"{type(error).__name__}: {error}"
            raise ClientError(f"client {who} in round {order.index}: {reason}") from error

    def _raise_any(self, failure: UserError | None) -> None:
        """Raises what went wrong on any rank on all of them, so that none waits for another."""
        ranks = self.fabric.world_size
        if ranks > 1:
            n_failures = torch.tensor(int(failure is not None), device=self.fabric.device)
            with together():
                distributed.all_reduce(n_failures)
            if n_failures:
                mine = failure and (str(failure), "".join(traceback.format_exception(failure)))
                told: list[tuple[str, str] | None] = [None] * ranks
                with together():
                    distributed.all_gather_object(told, mine)
                line, trace = next(filter(None, told))
                failure = failure or ClientError(line, trace)
        if failure is not None:
            raise failure
