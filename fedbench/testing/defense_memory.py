"""Checks of a defense's memory and randomness."""

from __future__ import annotations

import copy
import io

import torch

from fedbench.defense import Defense
from fedbench.testing.compare import bits, no_global_randomness, seed_globally
from fedbench.testing.contract import check
from fedbench.testing.defense_results import run_rounds
from fedbench.testing.rounds import ROUNDS, honest, view_of
from fedbench.testing.verify import verify_state


@check("result")
def state(defense: Defense) -> None:
    """The state consists of tensors, numbers, strings, None, dicts, lists and tuples."""
    current = defense.init()
    verify_state(current)
    for index, ids in enumerate(ROUNDS):
        updates = honest(len(ids), seed=index).float()
        _, current = defense.aggregate(updates, current, view_of(updates, ids, index))
        verify_state(current)


@check("inputs", "state")
def same_seed(defense: Defense) -> None:
    """The same seed gives the same bits; global random generators are not used."""
    rounds = [honest(10, seed=seed).float() for seed in range(3)]
    first = [*run_rounds(copy.deepcopy(defense), rounds)]
    seed_globally(123)
    with no_global_randomness("aggregate"):
        again = [*run_rounds(copy.deepcopy(defense), rounds)]
    same = bits(again) == bits(first)
    assert same, "two runs from the same seed differ; draw all random numbers from view.rng"


@check("same_seed")
def memory(defense: Defense) -> None:
    """Memory is in the returned state only: not in `self`, not in the state received."""
    before = defense.init()
    for index, ids in enumerate(ROUNDS):
        updates = honest(len(ids), seed=index).float()
        content = bits(before)
        first, after = defense.aggregate(updates, before, view_of(updates, ids, index))
        unchanged = bits(before) == content
        assert unchanged, f"aggregate modified the state it received in round {index}; copy it"
        again, after_again = defense.aggregate(updates, before, view_of(updates, ids, index))
        same = bits([again, after_again]) == bits([first, after])
        assert same, (
            f"round {index}, repeated from the same state, differs: the defense remembers "
            "something outside its state; return all memory as the state"
        )
        before = after


@check("memory")
def checkpoint(defense: Defense) -> None:
    """A state that was saved and loaded gives the same bits."""
    kept = restored = defense.init()
    for index, ids in enumerate(ROUNDS):
        updates = honest(len(ids), seed=index).float()
        file = io.BytesIO()
        torch.save(restored, file)
        file.seek(0)
        restored = torch.load(file, weights_only=True)
        expected, kept = defense.aggregate(updates, kept, view_of(updates, ids, index))
        found, restored = defense.aggregate(updates, restored, view_of(updates, ids, index))
        same = bits([found, restored]) == bits([expected, kept])
        assert same, f"round {index} differs after the state was saved and loaded"
