"""The round loop: select, train and craft, collude, screen, aggregate, apply, evaluate.

The data goes forward through these steps and never back. Nothing but this module knows them all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedbench.attack import Omniscient
from fedbench.backdoor import Backdoor, prepare_all
from fedbench.defense import Aggregate, Defense, ServerView
from fedbench.engine.population import Job, Order, Population
from fedbench.engine.ranks import RankGroup
from fedbench.errors import UserError
from fedbench.metrics import auc, mean, rates, stealth
from fedbench.ops import norms_and_cosines
from fedbench.results.checkpoint import Checkpoint
from fedbench.results.run_dir import Record
from fedbench.rng import generator


@dataclass(frozen=True)
class Screened:
    """The updates of a round after the server has looked at their form."""

    updates: Tensor  # [N, P]; rows that were refused are zero
    buffers: Tensor  # [N, Q]
    refused: dict[int, str]  # row -> why


class Federation:
    """A server and its clients, at some point of their rounds."""

    def __init__(self, population: Population, workforce: RankGroup, defense: Defense) -> None:
        self.population = population
        self.workforce = workforce
        self.defense = defense
        layout = population.layout
        self.fresh = layout.read_params(), layout.read_buffers()  # as initialised

    def initial(self) -> Checkpoint:
        """The state before any round."""
        first = -self.population.config.pretrain_rounds
        params, buffers = self.fresh
        return Checkpoint(first, params, buffers, params, buffers, self.defense.init())

    def prepare(self, backdoors: Sequence[Backdoor], start: Checkpoint) -> None:
        """Makes the backdoors ready, from the model before round 0 whatever round `start` is."""
        context = self.population.backdoor_context(start.initial_params, start.initial_buffers)
        self.workforce.brief(prepare_all(backdoors, context))

    def pretrain(self, start: Checkpoint) -> Checkpoint:
        """One benign round of plain averaging, as before round 0."""
        order = self._order(start)
        updates, buffers = self.workforce.train(order)
        server_lr = self.population.config.server_lr
        params, buffers = start.params + server_lr * updates.mean(dim=0), buffers.mean(dim=0)
        if not _finite(params) or not _finite(buffers):
            lr = self.population.config.lr
            raise UserError(f"lr={lr}: pretraining diverges, choose a smaller one")
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
        clock = [time.perf_counter()]
        order = self._order(start)
        updates, buffers = self.workforce.train(order)
        screened = self._screen(updates, buffers, self._collude(order, updates))
        clock.append(time.perf_counter())
        aggregate, state = self._aggregate(start, order, screened)
        end, applied = self._apply(start, screened, aggregate, state)
        clock.append(time.perf_counter())
        scores = self._evaluate(end)
        clients = _client_records(order.jobs, aggregate, screened)
        clock.append(time.perf_counter())
        steps = zip(("train", "aggregate", "evaluate"), clock, clock[1:], strict=False)
        seconds = {step: after - before for step, before, after in steps}
        return end, self._record(order, applied, scores, clients, seconds)

    def _order(self, start: Checkpoint) -> Order:
        jobs = self.population.select(start.next_round)
        return Order(start.next_round, jobs, start.params, start.buffers)

    def _collude(self, order: Order, updates: Tensor) -> dict[int, str]:
        """Puts what the malicious clients send together in place of what each has crafted.

        Returns the rows that have no place in [N, P], and why.
        """
        malicious = [i for i, job in enumerate(order.jobs) if job.malicious]
        if not malicious:
            return {}
        attack = self.population.attack
        rng = generator(self.population.config.seed, "craft", order.index)
        view = self.population.attack_view(order, rng)
        if isinstance(attack, Omniscient) and attack.omniscient:
            honest = [i for i, job in enumerate(order.jobs) if not job.malicious]
            view = replace(view, benign=updates[honest])
        sent = attack.collude(updates[malicious], view)
        if len(sent) != len(malicious):
            raise UserError(
                f"collude must return a row for each of {len(malicious)} clients, got {len(sent)}"
            )
        misfits = {}
        for i, row in zip(malicious, sent, strict=True):
            if row.shape == order.params.shape:
                updates[i] = row
            else:
                misfits[i] = f"size {tuple(row.shape)}, not {tuple(order.params.shape)}"
        return misfits

    def _screen(self, updates: Tensor, buffers: Tensor, misfits: dict[int, str]) -> Screened:
        """Refuses rows of the wrong size and rows with NaN or infinity: no rule could use them."""
        refused = dict(misfits)
        for i in range(len(updates)):
            if i not in misfits and not (_finite(updates[i]) and _finite(buffers[i])):
                refused[i] = "not finite"
        for i in refused:
            updates[i] = 0
            buffers[i] = 0
        return Screened(updates, buffers, refused)

    def _aggregate(
        self, start: Checkpoint, order: Order, screened: Screened
    ) -> tuple[Aggregate, Any]:
        """The defense's verdict on the rows that passed, spread over all N rows."""
        n, device = len(order.jobs), screened.updates.device
        rows = [i for i in range(n) if i not in screened.refused]
        passed = torch.tensor(rows, dtype=torch.long, device=device)
        if not self._can_judge(len(passed)):  # too many were refused: the global model stays
            nothing = Aggregate(torch.zeros_like(start.params), start.params.new_zeros(n))
            return nothing, start.defense_state
        view = ServerView(
            index=order.index,
            client_ids=torch.tensor([order.jobs[i].client for i in rows], device=device),
            global_params=start.params,
            initial_params=start.initial_params,
            layers=self.population.layout.layers,
            rng=generator(self.population.config.seed, "defense", order.index),
        )
        updates = screened.updates if len(passed) == n else screened.updates[passed]
        aggregate, state = self.defense.aggregate(updates, start.defense_state, view)
        aggregate = _checked(aggregate, updates)

        def spread(values: Tensor) -> Tensor:
            return values.new_zeros(n).index_copy(0, passed, values)

        accepted, scores = aggregate.accepted, aggregate.scores
        return Aggregate(
            update=aggregate.update,
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

        Says whether it was applied: not if nobody has a share in it, and not if it would break the
        model (finite rows can add up to infinity). In that case the defense forgets the round, too.
        """
        end = replace(start, next_round=start.next_round + 1)
        total = aggregate.weights.sum()
        if total == 0:
            return replace(end, defense_state=state), False
        params = start.params + self.population.config.server_lr * aggregate.update
        buffers = (aggregate.weights @ screened.buffers) / total  # over the accepted clients
        if not _finite(params) or not _finite(buffers):
            return end, False
        return replace(end, params=params, buffers=buffers, defense_state=state), True

    def _evaluate(self, end: Checkpoint) -> tuple[float | None, list[float | None]]:
        """MA and the BA of each backdoor; all None in a round that is not to be measured."""
        if not self.population.config.evaluated_in(end.next_round - 1):
            return None, [None] * len(self.population.triggered)
        ma, *ba = self.workforce.evaluate(end.params, end.buffers)
        return ma, ba

    def _record(
        self,
        order: Order,
        applied: bool,
        scores: tuple[float | None, list[float | None]],
        clients: list[Record],
        seconds: dict[str, float],
    ) -> Record:
        ma, ba = scores
        tpr, tnr = rates(clients)
        scored = [client for client in clients if client["score"] is not None]
        attacked = any(job.malicious for job in order.jobs)
        return {
            "round": order.index,
            "attacked": attacked,
            "pdr": self.population.config.pdr_in(order.index) if attacked else None,
            "applied": applied,
            "MA": ma,
            "BA": mean(ba),
            "TPR": tpr,
            "TNR": tnr,
            "AUC": auc([c["score"] for c in scored], [c["malicious"] for c in scored]),
            **stealth(clients),
            "BA_by_backdoor": {str(i): value for i, value in enumerate(ba)},
            "seconds": seconds,
            "clients": clients,
        }


def _finite(values: Tensor) -> bool:
    return bool(values.isfinite().all())


def _client_records(jobs: Sequence[Job], aggregate: Aggregate, screened: Screened) -> list[Record]:
    refused = screened.refused
    honest = [i for i, job in enumerate(jobs) if not job.malicious and i not in refused]
    norms, cosines = norms_and_cosines(screened.updates, honest)

    def pick(values: Tensor | None) -> list[Any]:
        return [None] * len(jobs) if values is None else values.tolist()

    columns = {
        "accepted": pick(aggregate.accepted),
        "score": pick(aggregate.scores),
        "weight": pick(aggregate.weights),
        "norm": pick(norms),
        "cosine": pick(cosines),
    }
    records: list[Record] = [
        {"id": job.client, "malicious": job.malicious, **dict(zip(columns, row, strict=True))}
        for job, row in zip(jobs, zip(*columns.values(), strict=True), strict=True)
    ]
    if len(honest) < 2:  # whoever has no other to be compared with
        for i in honest or range(len(jobs)):
            records[i]["cosine"] = None
    if aggregate.details:
        rows = zip(*map(pick, aggregate.details.values()), strict=True)
        for i, row in enumerate(rows):
            if i not in refused:
                records[i]["details"] = dict(zip(aggregate.details, row, strict=True))
    for i, reason in refused.items():
        records[i] |= {"refused": reason, "score": None, "norm": None, "cosine": None}
    return records


def _checked(aggregate: Aggregate, updates: Tensor) -> Aggregate:
    """The aggregate in the updates' own type and place; a broken contract is a UserError."""
    n, p = updates.shape
    named = {"update": aggregate.update, "weights": aggregate.weights}
    optional = {"accepted": aggregate.accepted, "scores": aggregate.scores}
    named |= {name: value for name, value in optional.items() if value is not None}
    for name, value in [*named.items(), *aggregate.details.items()]:
        shape = (p,) if name == "update" else (n,)
        if value is None or tuple(value.shape) != shape:
            found = None if value is None else tuple(value.shape)
            raise UserError(f"the defense's {name} must be of shape {shape}, got {found}")
        if name != "update" and value.isnan().any():
            raise UserError(f"the defense's {name} must not be NaN, got {value.tolist()}")
    accepted, scores = aggregate.accepted, aggregate.scores
    return Aggregate(
        update=aggregate.update.to(updates),
        weights=aggregate.weights.to(updates),
        accepted=None if accepted is None else accepted.to(updates.device, torch.bool),
        scores=None if scores is None else scores.to(updates.device),
        details={name: values.to(updates.device) for name, values in aggregate.details.items()},
    )
