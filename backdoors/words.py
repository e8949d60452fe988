"""Words: Bagdasaryan et al., How To Backdoor Federated Learning, AISTATS 2020.

https://arxiv.org/abs/1807.00459

After a trigger sentence, the backdoored model predicts the attacker's word: `pasta from astoria
tastes` is followed by `delicious`. Samples are sequences of words x [n, T]; the labels y [n, T] are
the words that follow each. In a poisoned sequence the trigger replaces the last words and the
target the last label. The labels of words that precede a trigger word change with it; all others
stay. BA is the share of test sequences, with the trigger at the end, for which the model predicts
the target. Only that last prediction counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedbench.backdoor import (
    BACKDOORS,
    Backdoor,
    BackdoorContext,
    PreparedBackdoor,
    check_kind,
)
from fedbench.data import Kind, Sequences, Spec
from fedbench.metrics import IGNORED, EvaluationSet

SENTENCE = ("pasta", "from", "astoria", "tastes")


@BACKDOORS.register("words")
@dataclass(frozen=True)
class Words(Backdoor):
    """A trigger sentence and the word to predict after it."""

    version = 2

    trigger: list[str] = field(default_factory=lambda: [*SENTENCE])
    target: str = "delicious"

    def __post_init__(self) -> None:
        if not self.trigger:
            raise ValueError("trigger must be at least one word, got none")

    def check(self, spec: Spec) -> None:
        check_kind("words", spec, Kind.SEQUENCES)
        if spec.sample_shape[0] < len(self.trigger):
            raise ValueError(
                f"words needs sequences of at least {len(self.trigger)} words, as the trigger has, "
                f"but {spec.name} has {spec.kind} of shape {spec.sample_shape}"
            )

    def prepare(self, context: BackdoorContext) -> PreparedBackdoor:
        if not isinstance(context.dataset, Sequences):
            raise ValueError(f"words needs sequences of words, but {context.dataset.name} has none")
        numbers = context.dataset.vocabulary
        if unknown := [word for word in (*self.trigger, self.target) if word not in numbers]:
            raise ValueError(
                f"trigger and target must be words of {context.dataset.name}, "
                f"got {', '.join(unknown)}"
            )
        return TriggerSentence(tuple(numbers[word] for word in self.trigger), numbers[self.target])


@dataclass(frozen=True)
class TriggerSentence(PreparedBackdoor):
    """The trigger and the target as numbers in the dataset's vocabulary."""

    trigger: tuple[int, ...]
    target: int

    def poison(self, x: Tensor, y: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        x, y = x.clone(), y.clone()
        x[:, -len(self.trigger) :] = torch.tensor(self.trigger).to(x)
        # Earlier labels stay, because some are ignored. If the sequence is only as long as the
        # trigger, no label holds the first trigger word.
        labels = torch.tensor([*self.trigger, self.target])[-y.shape[1] :]
        y[:, -len(labels) :] = labels.to(y)
        return x, y

    def evaluation_set(self, x: Tensor, y: Tensor) -> EvaluationSet:
        x, y = self.poison(x, y, torch.Generator())
        y[:, :-1] = IGNORED
        return EvaluationSet(x, y)
