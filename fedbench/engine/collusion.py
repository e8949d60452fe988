"""The round's last step on the attackers' side: malicious clients coordinate their updates."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedbench.attack import ATTACKS, Omniscient
from fedbench.engine.client_selection import Round, malicious_positions
from fedbench.engine.rank_context import RankContext
from fedbench.plugin_answers import checked_rows
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
    own = updates[malicious]  # [M, P]
    sent = checked_rows(ATTACKS.label(attack), attack.collude(own, view), own)
    wrong_size = {}
    for i, row in zip(malicious, sent, strict=True):
        if row.shape == round_.params.shape:
            updates[i] = row
        else:
            wrong_size[i] = f"size {tuple(row.shape)}, not {tuple(round_.params.shape)}"
    return wrong_size
