"""The round's last step on the attackers' side: malicious clients coordinate their updates."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedbench.attack import Omniscient
from fedbench.engine.client_selection import Round, malicious_positions
from fedbench.engine.rank_context import RankContext
from fedbench.errors import UserError
from fedbench.rng import generator


def collude(rank_context: RankContext, round_: Round, updates: Tensor) -> dict[int, str]:
    """Replace the malicious rows of updates [N, P] by what the attack sends instead.

    Returns the rows of the wrong size, which do not fit into [N, P], with the reason.
    """
    participants = round_.participants
    malicious = malicious_positions(participants)
    if not malicious:
        return {}
    attack = rank_context.attack
    rng = generator(rank_context.config.seed, "craft", round_.index)
    view = rank_context.attack_view(round_, rng)
    if isinstance(attack, Omniscient) and attack.omniscient:
        honest = [i for i, participant in enumerate(participants) if not participant.malicious]
        view = replace(view, benign=updates[honest])
    sent = attack.collude(updates[malicious], view)
    if len(sent) != len(malicious):
        raise UserError(
            f"collude must return a row for each of {len(malicious)} clients, got {len(sent)}"
        )
    wrong_size = {}
    for i, row in zip(malicious, sent, strict=True):
        if row.shape == round_.params.shape:
            updates[i] = row
        else:
            wrong_size[i] = f"size {tuple(row.shape)}, not {tuple(round_.params.shape)}"
    return wrong_size
