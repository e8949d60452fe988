"""A check of an attack in the round loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedbench.attack import Attack
from fedbench.backdoor import BACKDOORS, Backdoor, settings_of
from fedbench.defense import Aggregate, Defense, ServerView
from fedbench.testing.contract import NotApplicable, check
from fedbench.testing.samples import images
from fedbench.testing.verify import value_error

N_CLIENTS = 6


@dataclass(frozen=True)
class Recorder(Defense):
    """Keep the updates as the state. The global model stays: huge updates could overflow it."""

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        nothing = Aggregate(torch.zeros_like(updates[0]), updates.new_zeros(len(updates)))
        return nothing, updates.clone()


@dataclass(frozen=True)
class Nobody(Attack):
    """No client attacks."""

    active: ClassVar[bool] = False


def sent_in_a_round(attack: Attack, backdoors: Sequence[Backdoor], pmr: float) -> Tensor:
    """Return the updates [N, P] that reach the server in the first round; malicious ones last."""
    # Lightning takes seconds to import, and only this check needs it.
    from lightning.fabric import Fabric

    from fedbench.config import RunConfig
    from fedbench.engine.executors import Sequential
    from fedbench.engine.rank_context import RankContext
    from fedbench.engine.ranks import RankGroup
    from fedbench.federation import Federation

    config = RunConfig(
        n_clients=N_CLIENTS, pmr=pmr, non_iid=0, pretrain_rounds=0, local_epochs=1, batch_size=16
    )
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 10))
    fabric = Fabric(accelerator="cpu", devices=1)
    context = RankContext(config, images(1, 28, 28), network, attack, fabric)
    federation = Federation(RankGroup(Sequential(), context), Recorder())
    start = federation.initial()
    federation.prepare(backdoors, start)
    end, record = federation.round(start)
    refused = [client["refused"] for client in record["clients"] if "refused" in client]
    assert not refused, f"the server refuses {len(refused)} of {N_CLIENTS} updates: {refused[0]}"
    updates: Tensor = end.defense_state
    malicious = {*context.selection.malicious}
    clients = [participant.client for participant in context.selection.select(start.next_round)]
    order = sorted(range(N_CLIENTS), key=lambda i: (clients[i] in malicious, i))
    return updates[order]


@cache
def sent_without_attack(pmr: float) -> Tensor:
    return sent_in_a_round(Nobody(), (), pmr)


@check(
    *("backdoors", "poison_seed", "objective", "project", "craft", "collude"),
    cases=((1,), (3,), (6,)),
)
def round_loop(attack: Attack, n_malicious: int) -> None:
    """In a round of 6 clients, malicious updates are finite and honest ones do not change."""
    chosen = attack.backdoor_settings([{"name": "patch"}])
    backdoors = [BACKDOORS.build(settings_of(backdoor)) for backdoor in chosen]
    spec = images(1, 28, 28).spec
    tests = [partial(backdoor.check, spec) for backdoor in backdoors]
    for fits in (*tests, partial(attack.check, backdoors, spec)):
        if (line := value_error(fits)) is not None:
            raise NotApplicable(f"needs other data than images (1, 28, 28): {line}")
    pmr, n_honest = n_malicious / N_CLIENTS, N_CLIENTS - n_malicious * attack.active
    sent = sent_in_a_round(attack, backdoors, pmr)
    clean = sent_without_attack(pmr)
    same = torch.equal(sent[:n_honest], clean[:n_honest])
    assert same, "honest clients send other updates than without the attack"
    again = sent_in_a_round(attack, backdoors, pmr)
    assert torch.equal(again, sent), "the same seed gives other updates"
    changed = not torch.equal(sent[n_honest:], clean[n_honest:])
    assert changed or not attack.active, (
        "malicious clients send honest updates: does the attack override "
        "poison, objective, project, craft or collude?"
    )
