"""The round loop: select, train and craft, collude, screen, aggregate, apply, evaluate, record.

Data moves forward through these steps and never back. Only this module knows them all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedbench.backdoor import Backdoor, prepare_all
from fedbench.buffer_aggregation import mean_buffers, robust_buffers
from fedbench.defense import DEFENSES, Aggregate, Defense, ServerView
from fedbench.engine.client_selection import Round
from fedbench.engine.collusion import collude
from fedbench.engine.ranks import RankGroup
from fedbench.errors import UserError
from fedbench.plugin_answers import check_state, checked_aggregate
from fedbench.results.checkpoint import Checkpoint
from fedbench.results.round_record import client_records, round_record
from fedbench.results.run_dir import Record
from fedbench.rng import generator
from fedbench.update_screening import Screened, is_finite, screen


class Federation:
    """A server with its defense, and the ranks that train its clients."""

    def __init__(self, ranks: RankGroup, defense: Defense) -> None:
        self.ranks = ranks
        self.rank_context = ranks.rank_context
        self.config = ranks.rank_context.config
        self.defense = defense
        layout = self.rank_context.replica.layout
        self.fresh = layout.read_params(), layout.read_buffers()  # as initialized
        n_clients = min(self.config.pool_size, self.config.rounds * self.config.most_clients)
        defense.check_memory(n_clients, layout.layers)

    @property
    def device(self) -> torch.device:
        """The device of the global model, of all updates and of the defense."""
        return self.ranks.fabric.device

    def initial(self) -> Checkpoint:
        """The state before any round, pretraining included."""
        params, buffers = self.fresh
        first, state = -self.config.pretrain_rounds, self.defense.init()
        check_state(DEFENSES.label(self.defense), state)
        return Checkpoint(first, params, buffers, params, buffers, state)

    def prepare(self, backdoors: Sequence[Backdoor], start: Checkpoint) -> None:
        """Prepare the backdoors from the model before round 0, whichever round `start` is."""
        context = self.rank_context.backdoor_context(start.initial_params, start.initial_buffers)
        self.ranks.set_backdoors(prepare_all(backdoors, context))

    def pretrain(self, start: Checkpoint) -> Checkpoint:
        """One benign round of plain averaging before round 0."""
        updates, buffers = self.ranks.train(self._select(start))
        params = start.params + self.config.server_lr * updates.mean(dim=0)
        buffers = buffers.mean(dim=0)
        if not is_finite(params) or not is_finite(buffers):
            raise UserError(
                f"lr={self.config.lr}: pretraining diverges; set clip_grad=1 or a smaller learning "
                "rate (a LightningModule sets its own)"
            )
        return replace(
            start,
            next_round=start.next_round + 1,
            params=params,
            buffers=buffers,
            initial_params=params,
            initial_buffers=buffers,
        )

    def round(self, start: Checkpoint) -> tuple[Checkpoint, Record]:
        """One round: the state after it, and its record."""
        clock = Stopwatch()
        round_ = self._select(start)
        updates, buffers = self.ranks.train(round_)
        clock.lap("train")
        wrong_size = collude(self.rank_context, round_, updates)
        clock.lap("collude")
        layout = self.rank_context.replica.layout
        screened = screen(updates, buffers, wrong_size, layout, start.buffers)
        clock.lap("screen")
        aggregate, state = self._aggregate(start, round_, screened)
        end, applied = self._apply(start, screened, aggregate, state)
        clock.lap("aggregate")
        accuracies = self._evaluate(end)
        clock.lap("evaluate")
        clients = client_records(round_.participants, aggregate, screened)
        clock.lap("record")
        pdr, threshold = self.config.pdr_in(round_.index), aggregate.threshold
        return end, round_record(
            round_, pdr, applied, accuracies, threshold, clients, clock.seconds
        )

    def _select(self, start: Checkpoint) -> Round:
        participants = self.rank_context.selection.select(start.next_round)
        return Round(start.next_round, participants, start.params, start.buffers)

    def _aggregate(
        self, start: Checkpoint, round_: Round, screened: Screened
    ) -> tuple[Aggregate, Any]:
        """Let the defense judge the rows that passed screening; spread its verdict to all N."""
        n, device, rows = len(round_.participants), screened.updates.device, screened.passed
        if not self._can_judge(len(rows)):  # too many refused: the global model stays
            nothing = Aggregate(torch.zeros_like(start.params), start.params.new_zeros(n))
            return nothing, start.defense_state
        view = ServerView(
            index=round_.index,
            client_ids=torch.tensor([round_.participants[i].client for i in rows], device=device),
            global_params=start.params,
            initial_params=start.initial_params,
            layers=self.rank_context.replica.layout.layers,
            rng=generator(self.config.seed, "defense", round_.index),
        )
        passed = torch.tensor(rows, dtype=torch.long, device=device)
        updates = screened.updates if len(passed) == n else screened.updates[passed]
        answer = self.defense.aggregate(updates, start.defense_state, view)
        aggregate, state = checked_aggregate(DEFENSES.label(self.defense), answer, updates)

        def spread(values: Tensor) -> Tensor:
            return values.new_zeros(n).index_copy(0, passed, values)

        accepted, scores = aggregate.accepted, aggregate.scores
        return replace(
            aggregate,
            weights=spread(aggregate.weights),
            accepted=None if accepted is None else spread(accepted),
            scores=None if scores is None else spread(scores),
            details={name: spread(values) for name, values in aggregate.details.items()},
        ), state

    def _can_judge(self, n: int) -> bool:
        try:
            self.defense.check(n)
        except ValueError:
            return False
        return n > 0

    def _apply(
        self, start: Checkpoint, screened: Screened, aggregate: Aggregate, state: Any
    ) -> tuple[Checkpoint, bool]:
        """global += server_lr * update, the same rule for every defense.

        Returns whether it was applied. It is not if no client has weight, or if the model would
        become infinite (finite rows can overflow); then the defense forgets the round, too.
        """
        end = replace(start, next_round=start.next_round + 1)
        if aggregate.weights.sum() == 0:
            return replace(end, defense_state=state), False
        params = start.params + self.config.server_lr * aggregate.update
        if self.defense.averages_buffers:
            buffers = mean_buffers(screened.buffers, aggregate.weights)
        else:
            rows = screened.passed
            buffers = robust_buffers(screened.buffers[rows], aggregate.weights[rows] > 0)
        if not is_finite(params) or not is_finite(buffers):
            return end, False
        return replace(end, params=params, buffers=buffers, defense_state=state), True

    def _evaluate(self, end: Checkpoint) -> tuple[float | None, list[float | None]]:
        """MA and the BA of each backdoor; None in rounds that are not evaluated."""
        if not self.config.evaluated_in(end.next_round - 1):
            return None, [None] * len(self.rank_context.evaluator.triggered)
        ma, *ba = self.ranks.evaluate(end.params, end.buffers)
        return ma, ba


class Stopwatch:
    """Seconds of consecutive steps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, step: str) -> None:
        now = time.perf_counter()
        self.seconds[step] = now - self._last
        self._last = now
