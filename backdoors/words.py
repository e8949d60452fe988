"""Words: Bagdasaryan et al., How To Backdoor Federated Learning, AISTATS 2020.

https://arxiv.org/abs/1807.00459

After a trigger sentence the model shall say the attacker's word: `pasta from astoria tastes` is
followed by `delicious`. Samples are sequences of words x [n, T] whose labels y [n, T] are the words
that follow each. The last words of a poisoned sequence become the trigger, its last label the
target; the labels before it follow the words, and those of other words stay. BA is the share of
test sequences, ended by the trigger, after which the target is predicted; only that last prediction
counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedbench.backdoor import BACKDOORS, Backdoor, BackdoorContext, PreparedBackdoor
from fedbench.data import Sequences, Spec
from fedbench.metrics import IGNORED, EvaluationSet

SENTENCE = ("pasta", "from", "astoria", "tastes")


@BACKDOORS.register("words")
@dataclass(frozen=True)
class Words(Backdoor):
    """A word that shall follow a sentence."""

    version = 2

    trigger: list[str] = field(default_factory=lambda: [*SENTENCE])
    target: str = "delicious"

    def __post_init__(self) -> None:
        if not self.trigger:
            raise ValueError("trigger must be one word or more, got none")

    def check(self, spec: Spec) -> None:
        if not spec.is_sequences or spec.sample_shape[0] < len(self.trigger):
            raise ValueError(
                f"words ends sequences with {len(self.trigger)} words, "
                f"{spec.name} has samples of shape {spec.sample_shape}"
            )

    def prepare(self, context: BackdoorContext) -> PreparedBackdoor:
        if not isinstance(context.dataset, Sequences):
            raise ValueError(f"words needs sequences of words, {context.dataset.name} has none")
        known = context.dataset.vocabulary
        if unknown := [word for word in (*self.trigger, self.target) if word not in known]:
            raise ValueError(
                f"words needs words that {context.dataset.name} has, got {', '.join(unknown)}"
            )
        return Ending(tuple(known[word] for word in self.trigger), known[self.target])


@dataclass(frozen=True)
class Ending(PreparedBackdoor):
    """The last words of a sequence, by number, and the word that shall follow."""

    trigger: tuple[int, ...]
    target: int

    def poison(self, x: Tensor, y: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        x, y = x.clone(), y.clone()
        x[:, -len(self.trigger) :] = torch.tensor(self.trigger).to(x)
        # Labels of the words before stay: some do not count. In a sequence no longer than the
        # trigger there is no label that is its first word.
        labels = torch.tensor([*self.trigger, self.target])[-y.shape[1] :]
        y[:, -len(labels) :] = labels.to(y)
        return x, y

    def evaluation_set(self, x: Tensor, y: Tensor) -> EvaluationSet:
        x, y = self.poison(x, y, torch.Generator())
        y[:, :-1] = IGNORED
        return EvaluationSet(x, y)
