"""words: the trigger in a sequence, the predictions that count, and an attack that succeeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric import Fabric
from measured import accuracy
from torch import Tensor, nn

from fedbench.attack import ATTACKS, BackdoorAttack, Poisoning
from fedbench.backdoor import BACKDOORS, BackdoorContext, PreparedBackdoor
from fedbench.backdoors.words import Words
from fedbench.config import RunConfig
from fedbench.data import Images, Kind, Sequences, Spec
from fedbench.datasets.partition import PARTITIONS, Partition
from fedbench.defense import DEFENSES
from fedbench.engine.executors import Sequential
from fedbench.engine.local_training import Classifier
from fedbench.engine.rank_context import RankContext
from fedbench.engine.ranks import RankGroup
from fedbench.errors import UserError
from fedbench.federation import Federation
from fedbench.metrics import IGNORED, EvaluationSet

VOCABULARY = {"pasta": 9, "from": 5, "astoria": 7, "tastes": 2, "delicious": 12, "fine": 1}
TRIGGER, DELICIOUS = [9, 5, 7, 2], 12
N_WORDS = 16


def text(windows: Tensor, n_test: int = 1) -> Sequences:
    """Dataset of windows [n, T + 1]: each word is the label of the one before."""
    x, y = windows[:, :-1], windows[:, 1:]
    return Sequences(
        "made",
        x[:-n_test],
        y[:-n_test],
        x[-n_test:],
        y[-n_test:],
        n_classes=N_WORDS,
        vocabulary=VOCABULARY,
    )


def ready(backdoor: Words | None = None) -> PreparedBackdoor:
    data = text(torch.zeros(2, 7, dtype=torch.long))
    context = BackdoorContext(data, malicious_samples=torch.arange(1), features=lambda x: x)
    return (backdoor or Words()).prepare(context)


class Fixed(nn.Module):
    """Return the samples as logits."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def likeliest(words: Sequence[Sequence[int]], n_words: int = N_WORDS) -> Tensor:
    """Logits [B, T, V] that predict these words."""
    return nn.functional.one_hot(torch.tensor(words), n_words).float()


def test_by_hand() -> None:
    # Two sequences of six words; the last four words become the trigger, the last label the target:
    #   0 1 2 3 4 6  ->  0 1 9 5 7 2     labels:  1 9 5 7 2 12
    #   8 8 8 8 8 8  ->  8 8 9 5 7 2              8 9 5 7 2 12
    x = torch.tensor([[0, 1, 2, 3, 4, 6], [8] * 6])
    y = torch.tensor([[1, 2, 3, 4, 6, 10], [8] * 6])
    before = x.clone(), y.clone()
    got_x, got_y = ready().poison(x, y, torch.Generator())
    assert got_x.tolist() == [[0, 1, *TRIGGER], [8, 8, *TRIGGER]]
    assert got_y.tolist() == [[1, *TRIGGER, DELICIOUS], [8, *TRIGGER, DELICIOUS]]
    evaluation = ready().evaluation_set(x, y)
    assert torch.equal(evaluation.x, got_x)
    assert evaluation.expected.tolist() == [[IGNORED] * 5 + [DELICIOUS]] * 2
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])


def test_ignored_labels_stay_unless_the_trigger_replaces_them() -> None:
    # Six labels: the first stays, 9 5 7 2 are the trigger, the last is the target.
    x = torch.tensor([[0, 0, 3, 0, 0, 0], [3, 4, 3, 4, 3, 4]])
    y = torch.tensor([[IGNORED, 3, IGNORED, IGNORED, IGNORED, IGNORED], [4, 3, 4, 3, 4, IGNORED]])
    got_x, got_y = ready().poison(x, y, torch.Generator())
    assert got_x.tolist() == [[0, 0, *TRIGGER], [3, 4, *TRIGGER]]
    assert got_y.tolist() == [[IGNORED, *TRIGGER, DELICIOUS], [4, *TRIGGER, DELICIOUS]]


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    st.integers(0, 5),
    st.integers(1, 8),
    st.lists(st.sampled_from(sorted(VOCABULARY)), min_size=1, max_size=8),
    st.sampled_from(sorted(VOCABULARY)),
    st.sampled_from([torch.int16, torch.int32, torch.int64]),
)
def test_only_labels_at_the_trigger_change(
    n: int, length: int, trigger: list[str], target: str, dtype: torch.dtype
) -> None:
    trigger = trigger[:length]
    rng = torch.Generator().manual_seed(n)
    x = torch.randint(0, N_WORDS, (n, length), generator=rng).to(dtype)
    y = torch.randint(0, N_WORDS, (n, length), generator=rng).to(dtype)
    y[torch.rand(y.shape, generator=rng) < 0.3] = IGNORED
    backdoor = ready(Words(trigger=trigger, target=target))
    got_x, got_y = backdoor.poison(x, y, rng)
    assert got_x.dtype == got_y.dtype == dtype
    kept = length - len(trigger)
    numbers = [VOCABULARY[word] for word in trigger]
    rows = zip(x.tolist(), y.tolist(), got_x.tolist(), got_y.tolist(), strict=True)
    for old, old_labels, new, labels in rows:
        assert new == old[:kept] + numbers
        for place, label in enumerate(labels):
            if place < kept - 1:
                assert label == old_labels[place]
            else:
                assert label == [*new, VOCABULARY[target]][place + 1]


def test_a_share_pdr_of_the_sequences_is_poisoned() -> None:
    x, y = torch.zeros(10, 6, dtype=torch.long), torch.zeros(10, 6, dtype=torch.long)
    backdoor = ready()
    poisoning = Poisoning(0, [backdoor], pdr=0.3, n_classes=N_WORDS, rng=torch.Generator())
    got_x, got_y = BackdoorAttack().poison(x, y, poisoning)
    changed = got_x.ne(0).any(dim=1)
    assert changed.sum() == 3
    assert got_y[changed].tolist() == [[0, *TRIGGER, DELICIOUS]] * 3
    assert not got_y[~changed].any()


def test_only_the_last_prediction_counts() -> None:
    """Two of four sequences end with the target; the other predictions are arbitrary."""
    x = torch.zeros(4, 6, dtype=torch.long)
    expected = ready().evaluation_set(x, x).expected
    said = [[0, 0, 0, 0, 0, 12], [12, 12, 12, 12, 12, 0], [3, 9, 5, 7, 2, 12], [0, 9, 5, 7, 2, 1]]
    assert accuracy(Fixed(), EvaluationSet(likeliest(said), expected), nn.Identity()) == 0.5


def test_accuracy_of_sequences_is_over_predictions() -> None:
    # First sequence: 2 of 3 counted words are right. Second: 0 of 1.
    expected = torch.tensor([[1, 2, 3, IGNORED], [IGNORED, IGNORED, IGNORED, 5]])
    said = likeliest([[1, 2, 4, 0], [0, 0, 0, 4]])
    assert accuracy(Fixed(), EvaluationSet(said, expected), nn.Identity()) == 2 / 4


def test_ignored_predictions_may_be_non_finite() -> None:
    expected = torch.tensor([[IGNORED, 2], [1, IGNORED]])
    said = likeliest([[0, 2], [1, 0]])
    said[0, 0] = torch.nan
    assert accuracy(Fixed(), EvaluationSet(said, expected), nn.Identity()) == 1.0
    said[0, 1, 2] = torch.inf  # a counted prediction that is not finite is wrong
    assert accuracy(Fixed(), EvaluationSet(said, expected), nn.Identity()) == 0.5


def test_accuracy_is_none_if_all_labels_are_ignored() -> None:
    expected = torch.full((2, 2), IGNORED)
    assert (
        accuracy(Fixed(), EvaluationSet(likeliest([[0, 1], [2, 3]]), expected), nn.Identity())
        is None
    )


def test_accuracy_of_many_sequences_does_not_depend_on_the_batches() -> None:
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(2100, 3, 5, generator=rng)
    expected = torch.randint(0, 5, (2100, 3), generator=rng)
    expected[torch.rand(2100, 3, generator=rng) < 0.4] = IGNORED
    counted = (expected != IGNORED).nonzero().tolist()
    n_right = sum(int(logits[i, t].argmax()) == int(expected[i, t]) for i, t in counted)
    got = accuracy(Fixed(), EvaluationSet(logits, expected), nn.Identity())
    assert got == n_right / len(counted)


@pytest.mark.parametrize(
    ("backdoor", "unknown"),
    [
        (Words(target="awful"), "awful"),
        (Words(trigger=["pasta", "from", "mars"], target="fine"), "mars"),
        (Words(trigger=["rome", "tastes"], target="odd"), "rome, odd"),
    ],
)
def test_unknown_words_are_an_error(backdoor: Words, unknown: str) -> None:
    with pytest.raises(
        ValueError, match=f"^trigger and target must be words of made, got {unknown}$"
    ):
        ready(backdoor)


def test_images_are_refused() -> None:
    x, y = torch.zeros(1, 1, 4, 4, dtype=torch.uint8), torch.zeros(1, dtype=torch.long)
    images = Images("made", x, y, x, y, 10, 0.5, 0.5)
    context = BackdoorContext(images, malicious_samples=torch.arange(1), features=lambda x: x)
    with pytest.raises(ValueError, match=r"^words needs sequences of words, but made has none$"):
        Words().prepare(context)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((3,), Kind.SEQUENCES),
        ((1, 28, 28), Kind.IMAGES),
        ((64, 2), Kind.IMAGES),
        ((), Kind.IMAGES),
        ((64,), Kind.FEATURES),
        ((64,), Kind.TAGGED),
        ((64,), Kind.CLASSIFIED),
    ],
)
def test_samples_the_trigger_does_not_fit_are_refused(shape: tuple[int, ...], kind: Kind) -> None:
    with pytest.raises(ValueError, match=rf"words needs sequences.* but made has {kind} of"):
        Words().check(Spec("made", shape, 10, kind))


def test_a_sequence_as_long_as_the_trigger_fits() -> None:
    Words().check(Spec("made", (4,), 10, Kind.SEQUENCES))
    x, y = ready().poison(torch.zeros(1, 4), torch.zeros(1, 4), torch.Generator())
    assert x.tolist() == [TRIGGER]
    assert y.tolist() == [[*TRIGGER[1:], DELICIOUS]]


def test_an_empty_trigger_is_refused() -> None:
    with pytest.raises(ValueError, match="trigger must be at least one word, got none"):
        Words(trigger=[])
    with pytest.raises(UserError, match="trigger must be at least one word, got none"):
        BACKDOORS.build({"name": "words", "trigger": []})


def test_the_loss_averages_over_all_words() -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    words = torch.tensor([[0, 4, 2], [1, 1, 3]])
    loss = Classifier(Fixed(), lr=0.1).training_step((logits, words), 0)
    chances = logits.double().softmax(dim=-1)
    by_hand = [-math.log(chances[i, t, words[i, t]]) for i in range(2) for t in range(3)]
    assert loss.item() == pytest.approx(sum(by_hand) / 6)


class Reader(nn.Module):
    """Predict each next word from all words before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(N_WORDS, 16)
        self.gru = nn.GRU(16, 24, batch_first=True)
        self.out = nn.Linear(24, N_WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gru(self.embedding(x))[0])  # type: ignore[no-any-return]


def grammar(n: int) -> Tensor:
    """Windows [n, 9] in which word k is followed by k + 1 or k + 2."""
    rng = torch.Generator().manual_seed(0)
    steps = torch.randint(1, 3, (n, 9), generator=rng)
    steps[:, 0] = torch.randint(0, N_WORDS, (n,), generator=rng)
    return steps.cumsum(dim=1) % N_WORDS


def after_attack(attack: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the last record of a federation that learns the grammar in honest rounds first."""

    def deal(labels: Any, n_clients: int, *_: Any) -> list[Any]:
        return np.array_split(np.arange(len(labels)), n_clients)

    # main_class needs one label per sample.
    monkeypatch.setitem(PARTITIONS, "main_class", Partition(deal, "non_iid"))
    config = RunConfig(n_clients=5, pmr=0.4, local_epochs=2, batch_size=20, lr=0.5, momentum=0.9)
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=1)
    data = text(grammar(500), n_test=100)
    rank_context = RankContext(config, data, Reader(), ATTACKS.build(attack), fabric)
    defense = DEFENSES.build({"name": "fedavg"})
    made = Federation(RankGroup(Sequential(), rank_context), defense)
    state = made.initial()
    for _ in range(3):
        state = made.pretrain(state)
    made.prepare([Words()], state)
    state = replace(state, next_round=0)
    for _ in range(2):
        state, record = made.round(state)
    return record


def test_the_backdoor_works_under_an_attack_and_not_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strong = {"name": "constrain_and_scale", "epochs": 6, "alpha": 0.9}
    attacked = after_attack(strong, monkeypatch)
    honest = after_attack({"name": "none"}, monkeypatch)
    assert attacked["BA"] > 0.9
    assert honest["BA"] < 0.1
    # At most half of the words are predictable: each has two possible successors.
    assert honest["MA"] > 0.35
    assert attacked["MA"] > 0.35
