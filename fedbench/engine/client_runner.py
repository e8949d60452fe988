"""What clients do in a round: train locally, then, if malicious, craft the update they send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from fedbench.attack import ATTACKS, AttackView
from fedbench.engine.client_selection import Participant, Round, malicious_positions
from fedbench.engine.executors import Backend
from fedbench.engine.flat_parameters import FlatModel
from fedbench.engine.local_training import AttackHooks, LocalTraining
from fedbench.engine.rank_context import RankContext
from fedbench.plugin_answers import checked_objective, checked_update
from fedbench.rng import derive, generator


class ClientRunner:
    """Runs groups of clients on this rank."""

    def __init__(self, rank_context: RankContext, backend: Backend) -> None:
        self.rank_context = rank_context
        self.backend = backend

    def run(
        self, round_: Round, participants: Sequence[Participant], out: Sequence[FlatModel]
    ) -> None:
        """Run clients that the backend trains together; `out` receives updates and buffers."""
        context = self.rank_context
        context.replica.scale_lr(context.config.lr_scale_in(round_.index))
        views = self._attack_views(round_, participants)
        self._train(round_, participants, views, out)
        for row in out:
            row.params.sub_(round_.params)
        for i, view in views.items():
            self._craft(out[i].params, view)

    def _attack_views(
        self, round_: Round, participants: Sequence[Participant]
    ) -> dict[int, AttackView]:
        """What each malicious client knows, by position; with its clean update if it needs one."""
        seed, malicious = self.rank_context.config.seed, malicious_positions(participants)
        views = {
            i: self.rank_context.attack_view(
                round_, generator(seed, "objective", round_.index, participants[i].client)
            )
            for i in malicious
        }
        if not malicious or not self.rank_context.attack.needs_clean_update:
            return views
        clean = [FlatModel(*map(torch.empty_like, round_.model)) for _ in malicious]
        honest = [self._local_training(round_, participants[i]) for i in malicious]
        self.backend.fit(round_.model, honest, clean)
        return {
            i: replace(views[i], clean_update=row.params.sub_(round_.params))
            for i, row in zip(malicious, clean, strict=True)
        }

    def _train(
        self,
        round_: Round,
        participants: Sequence[Participant],
        views: Mapping[int, AttackView],
        out: Sequence[FlatModel],
    ) -> None:
        """Write each client's trained model to `out`; attackers that skip training keep G."""
        idle = () if self.rank_context.attack.trains else malicious_positions(participants)
        for i in idle:
            out[i].params.copy_(round_.params)
            out[i].buffers.copy_(round_.buffers)
        trained = [i for i in range(len(participants)) if i not in idle]
        trainings = [self._local_training(round_, participants[i], views.get(i)) for i in trained]
        self.backend.fit(round_.model, trainings, [out[i] for i in trained])

    def _craft(self, update: Tensor, view: AttackView) -> None:
        attack = self.rank_context.attack
        crafted = attack.craft(update, view)
        update.copy_(checked_update(ATTACKS.label(attack), crafted, update))

    def _local_training(
        self, round_: Round, participant: Participant, view: AttackView | None = None
    ) -> LocalTraining:
        """A client's local training: honest without a view, else as the attack defines it."""
        context = self.rank_context
        config, attack, data = context.config, context.attack, context.data
        key = (round_.index, participant.client)
        epochs, hooks = config.local_epochs, None
        if view is not None:
            epochs, label = attack.training.epochs or epochs, ATTACKS.label(attack)
            hooks = AttackHooks(
                attack.training,
                objective=lambda loss, params: checked_objective(
                    label, attack.objective(loss, params, view), loss
                ),
                project=lambda params: attack.project(params, view),
            )

        @lru_cache(maxsize=1)
        def read(epoch: int) -> tuple[Tensor, Tensor]:
            return data.samples(*key, epoch, poisoned=view is not None)

        return LocalTraining(
            samples=lambda epoch: read(epoch if data.dataset.augment else 0),
            epochs=epochs,
            batch_size=config.batch_size,
            rng=generator(config.seed, "batches", *key),
            decode=data.dataset.decode,
            seed=derive(config.seed, "layers", *key),
            hooks=hooks,
        )
