"""features: the features that are set and their values, parts, poisoning, an attack that works."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric import Fabric
from torch import Tensor, nn

from fedbench.attack import ATTACKS
from fedbench.backdoor import BACKDOORS, BackdoorContext, PreparedBackdoor
from fedbench.backdoors.features import FeatureTrigger, FeatureValues
from fedbench.config import RunConfig
from fedbench.data import Features, Kind, Spec
from fedbench.defense import DEFENSES
from fedbench.engine.executors import Sequential
from fedbench.engine.rank_context import RankContext
from fedbench.engine.ranks import RankGroup
from fedbench.errors import UserError
from fedbench.federation import Federation
from fedbench.results.run_dir import Record
from fedbench.testing import check_backdoor
from fedbench.testing.samples import feature_vectors

TABLE = Spec("made", (6,), 3, Kind.FEATURES)


def made(x: Tensor) -> Features:
    """Return a data set of 3 classes with these training samples."""
    n, width = x.shape
    y = torch.arange(n) % 3
    return Features("made", x, y, x, y, 3, torch.zeros(width), torch.ones(width))


def ready(backdoor: FeatureTrigger, x: Tensor) -> PreparedBackdoor:
    nobody = torch.zeros(0, dtype=torch.long)
    return backdoor.prepare(BackdoorContext(made(x), nobody, features=lambda x: x))


def test_contract() -> None:
    check_backdoor(FeatureTrigger(), [feature_vectors()])
    check_backdoor(FeatureTrigger(features=[5, 1], values=[9.0, -9.0]), [feature_vectors()])


def test_by_hand() -> None:
    # Feature 3 becomes 7, feature 1 becomes -1; the label becomes 2.
    x, y = torch.tensor([[1.0, 2, 3, 4, 5, 6], [0.0, 0, 0, 0, 0, 0]]), torch.tensor([0, 1])
    backdoor = ready(FeatureTrigger(target=2, features=[3, 1], values=[7.0, -1.0]), x)
    got, labels = backdoor.poison(x, y, torch.Generator())
    assert got.tolist() == [[1, -1, 3, 7, 5, 6], [0, -1, 0, 7, 0, 0]]
    assert labels.tolist() == [2, 2]
    assert x[0].tolist() == [1, 2, 3, 4, 5, 6]
    assert y.tolist() == [0, 1]


def test_default_values_are_one_standard_deviation_above_the_maximum() -> None:
    # Feature 0: 0 and 4, maximum 4, standard deviation 2. Feature 1 is constant: one above.
    x = torch.tensor([[0.0, 5.0, 1.0], [4.0, 5.0, 1.0]])
    backdoor = ready(FeatureTrigger(features=[1, 0]), x)
    assert backdoor == FeatureValues(0, (1, 0), (6.0, 6.0))


@pytest.mark.parametrize(("width", "n"), [(1, 1), (3, 3), (4, 4), (9, 4)])
def test_by_default_the_first_four_features_are_set(width: int, n: int) -> None:
    backdoor = FeatureTrigger()
    assert backdoor.n_places((width,)) == n
    backdoor.check(Spec("made", (width,), 3, Kind.FEATURES))
    stamped = ready(backdoor, torch.zeros(2, width)).poison(
        torch.zeros(2, width), torch.zeros(2, dtype=torch.long), torch.Generator()
    )[0]
    assert stamped.tolist() == [[1.0] * n + [0.0] * (width - n)] * 2


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.permutations(range(6)), st.integers(1, 6), st.integers(1, 8))
def test_parts_share_no_feature_and_add_up_to_the_trigger(
    order: list[int], n: int, n_parts: int
) -> None:
    chosen = order[:n]
    trigger = FeatureValues(0, tuple(chosen), (1.0,) * n)
    x = torch.zeros(1, 6)
    parts = [trigger.stamp(x, part, n_parts)[0].nonzero()[:, 0].tolist() for part in range(n_parts)]
    assert sorted(itertools.chain(*parts)) == sorted(chosen)
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 1
    for part in range(n_parts):
        x = trigger.stamp(x, part, n_parts)
    assert torch.equal(x, trigger.stamp(torch.zeros(1, 6)))


@pytest.mark.parametrize("target", range(3))
def test_evaluation_set_leaves_out_only_the_target_class(target: int) -> None:
    x, y = torch.arange(12.0).view(4, 3), torch.tensor([0, 1, 2, 1])
    evaluation = FeatureValues(target, (2,), (-1.0,)).evaluation_set(x, y)
    others = y != target
    assert torch.equal(evaluation.x[:, :2], x[others][:, :2])
    assert (evaluation.x[:, 2] == -1).all()
    assert evaluation.expected.tolist() == [target] * int(others.sum())


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"features": []}, r"features must be one or more different positions, got \[\]"),
        ({"features": [1, 1]}, r"different positions, got \[1, 1\]"),
        ({"features": [0, -1]}, r"different positions, got \[0, -1\]"),
        ({"values": [1.0]}, r"values must be one per feature, got features=None, values=\[1.0\]"),
        ({"features": [1], "values": [1.0, 2.0]}, r"values must be one per feature"),
        ({"features": [1], "values": [float("nan")]}, r"values must be finite, got \[nan\]"),
        ({"features": [1], "values": [float("inf")]}, r"values must be finite, got \[inf\]"),
    ],
)
def test_bad_settings_are_refused(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FeatureTrigger(**chosen)
    with pytest.raises(UserError, match=message):
        BACKDOORS.build({"name": "features", **chosen})


@pytest.mark.parametrize("target", [-1, 3])
def test_a_target_out_of_range_is_refused(target: int) -> None:
    with pytest.raises(ValueError, match=rf"target must be a class 0\.\.2, got {target}"):
        FeatureTrigger(target=target).check(TABLE)


def test_a_feature_out_of_range_is_refused() -> None:
    FeatureTrigger(features=[0, 5]).check(TABLE)
    with pytest.raises(ValueError, match=r"features must be positions 0\.\.5, got 6"):
        FeatureTrigger(features=[0, 6]).check(TABLE)


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.FEATURES])
def test_samples_other_than_feature_vectors_are_refused(kind: Kind) -> None:
    with pytest.raises(ValueError, match=rf"features needs feature vectors, but made has {kind}"):
        FeatureTrigger().check(Spec("made", (6,), 3, kind))


def after_attack(attack: str, **chosen: Any) -> Record:
    """Return the last record of a federation that learns three classes in honest rounds first."""
    rng = torch.Generator().manual_seed(0)
    y = torch.arange(900) % 3
    x = torch.randn(900, 8, generator=rng) + 2 * nn.functional.one_hot(y, 8)
    mean, std = x.mean(dim=0), x.std(dim=0)
    data = Features("made", x[:600], y[:600], x[600:], y[600:], 3, mean, std)
    config = RunConfig(
        n_clients=6, pmr=0.34, local_epochs=2, batch_size=20, non_iid=0.0, pretrain_rounds=0
    )
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    built = ATTACKS.build({"name": attack, **chosen})
    fabric = Fabric(accelerator="cpu", devices=1)
    context = RankContext(config, data, network, built, fabric)
    federation = Federation(RankGroup(Sequential(), context), DEFENSES.build({"name": "fedavg"}))
    state = federation.initial()
    federation.prepare([FeatureTrigger(features=[4, 5, 6, 7])], state)
    for _ in range(6):
        state, record = federation.round(state)
    return record


def test_the_backdoor_works_under_an_attack_and_not_without() -> None:
    attacked, honest = after_attack("constrain_and_scale"), after_attack("none")
    assert attacked["BA"] > 0.8
    assert honest["BA"] < 0.2
    assert min(attacked["MA"], honest["MA"]) > 0.7


def test_dba_splits_the_features_among_clients() -> None:
    record = after_attack("dba", backdoors=["features"], n_parts=2, gamma="auto")
    assert record["BA"] > 0.9
