"""The contract of every plugin. Parametrized over the registries, so new plugins are included."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import io
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hydra import compose, initialize_config_module
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import Tensor, nn

from fedbench.attack import ATTACKS, AttackView, BackdoorAttack, Poisoning
from fedbench.attacks.constrain_and_scale import ScaledBackdoorAttack
from fedbench.backdoor import BACKDOORS
from fedbench.config import register_schema
from fedbench.data import DATASETS, Spec
from fedbench.defense import DEFENSES, Aggregate, Defense, ServerView
from fedbench.engine.executors import EXECUTORS
from fedbench.engine.flat_parameters import ParameterLayout
from fedbench.errors import UserError
from fedbench.models import MODELS
from fedbench.registry import Registry
from fedbench.report.tracking import TRACKERS

# Defenses whose definition violates a test below, with the reason. Unknown names are ignored.
NOT_UNANIMOUS = {
    "foolsgold": "treats identical clients as sybils",
    "dp": "clips and adds noise",
    "flame": "adds noise",
    "baybfed": "drops identical clients as ties, and its mean threshold always drops someone",
}
NOISY = {"dp", "flame"}  # float32 and float64 noise of the same seed differ
TIES_BY_ORDER = {"krum"}  # among equal scores, selects the client that comes first
VARIANTS = {"defense": {"baybfed_literal"}}  # configs with other settings of a known plugin

REGISTRIES: dict[str, Registry[Any]] = {
    "defense": DEFENSES,
    "attack": ATTACKS,
    "dataset": DATASETS,
    "model": MODELS,
    "executor": EXECUTORS,
    "tracker": TRACKERS,
}
CHOICES = [(kind, name) for kind, registry in REGISTRIES.items() for name in registry.names()]
PLUGINS = [(kind, name) for kind, name in CHOICES if kind in ("defense", "attack")]

PAPER_DEFENSES = (
    "fedavg",
    "krum",
    "foolsgold",
    "auror",
    "afa",
    "dp",
    "median",
    "flame",
    "baybfed",
)
OPTIONS: tuple[dict[str, Any], ...] = (  # that change the computation or the state
    {"name": "krum", "m": "auto"},
    {"name": "krum", "f": 0, "m": 3},
    {"name": "foolsgold", "layers": "all"},
    {"name": "auror", "layers": "all", "alpha": 0.0},
    {"name": "auror", "rounds": 1, "tau": 0.0},
    {"name": "afa", "xi": 0.5, "xi_step": 0.25, "block": 0.6},
    {"name": "dp", "clip": 1e-6, "noise": 0.0},
    {"name": "flame", "noise": 0.0},
    {"name": "baybfed", "weights": "model"},
    {"name": "baybfed", "scoring": "sequential", "max_clusters": 2},
    {"name": "baybfed", "cosine": "angular", "tau": "cluster", "assign": "min"},
    {"name": "baybfed", "cosine": "similarity", "sigma0_sq": "auto", "persist": False},
    {"name": "baybfed", "filter": "pseudocode", "score": "divergence", "bins": 16},
    {"name": "baybfed", "weights": "model", "scoring": "sequential", "error_floor": 0.0},
    {"name": "baybfed", "cold_start": "score"},
    {"name": "baybfed", "threshold": "groups"},
)
SETTINGS = [{"name": name} for name in DEFENSES.names()] + list(OPTIONS)

every_defense = pytest.mark.parametrize("name", DEFENSES.names())
every_setting = pytest.mark.parametrize(
    "chosen", SETTINGS, ids=lambda chosen: "-".join(map(str, chosen.values()))
)
every_attack = pytest.mark.parametrize("name", ATTACKS.names())
TARGETED = [name for name in ATTACKS.names() if issubclass(ATTACKS.get(name), BackdoorAttack)]
SCALED = [name for name in TARGETED if issubclass(ATTACKS.get(name), ScaledBackdoorAttack)]
every_targeted = pytest.mark.parametrize("name", TARGETED)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


SMALL = ParameterLayout(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)))  # P = 53
LARGE = ParameterLayout(nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 4)))  # P = 1354
ROUNDS = (  # client ids of three rounds: clients join, leave and change position
    (0, 1, 2, 3, 4, 5, 6, 7, 8, 9),
    (12, 3, 5, 1, 20, 7, 0, 8, 9, 2),
    (5, 20, 30, 0, 2, 11, 12, 7, 8, 3),
)


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def honest(n: int, layout: ParameterLayout = SMALL, seed: int = 0) -> Tensor:
    """Draw updates like those of training, [N, P] float64: a common and an individual part."""
    p = layout.n_params
    return 0.1 * (noise(p, seed=seed) + 0.5 * noise(n, p, seed=seed + 1000))


def view_of(
    updates: Tensor,
    ids: Sequence[int] | None = None,
    index: int = 0,
    layout: ParameterLayout = SMALL,
    seed: int = 0,
) -> ServerView:
    return ServerView(
        index=index,
        client_ids=torch.tensor(range(len(updates)) if ids is None else ids),
        global_params=noise(layout.n_params, seed=77).to(updates.dtype),
        initial_params=noise(layout.n_params, seed=78).to(updates.dtype),
        layers=layout.layers,
        rng=torch.Generator().manual_seed(seed + index),
    )


def first_round(defense: Defense, updates: Tensor, layout: ParameterLayout = SMALL) -> Aggregate:
    return defense.aggregate(updates, defense.init(), view_of(updates, layout=layout))[0]


def bits(value: Any) -> Any:
    """Return a value to compare bit by bit, so that -0.0 differs from 0.0."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, Aggregate):
        return [bits(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    return value


def assert_valid_aggregate(outcome: Aggregate, updates: Tensor) -> None:
    n, p = updates.shape
    assert outcome.update.shape == (p,)
    assert outcome.update.dtype == updates.dtype
    assert outcome.update.isfinite().all()
    assert outcome.weights.shape == (n,)
    assert outcome.weights.dtype == updates.dtype
    assert (outcome.weights >= 0).all()  # also false for NaN
    total = float(outcome.weights.double().sum())
    assert total == 0 or total == pytest.approx(1, abs=1e-5)
    if outcome.accepted is not None:
        assert outcome.accepted.shape == (n,)
        assert outcome.accepted.dtype == torch.bool
        assert torch.equal(outcome.weights > 0, outcome.accepted)
    if outcome.scores is not None:
        assert outcome.scores.shape == (n,)
        assert outcome.scores.is_floating_point()
        assert outcome.scores.isfinite().all()
    assert isinstance(outcome.details, Mapping)
    for column, values in outcome.details.items():
        assert isinstance(column, str)
        assert values.shape == (n,)
        assert values.isfinite().all()


def assert_checkpointable(state: Any) -> None:
    """Allow only finite tensors and numbers, strings, None, and dicts, lists and tuples of them."""
    if type(state) is dict:
        assert all(type(key) in (int, str) for key in state), state
        parts: list[Any] = list(state.values())
    elif type(state) in (list, tuple):
        parts = list(state)
    else:
        assert type(state) in (Tensor, bool, int, float, str, type(None)), type(state)
        assert not isinstance(state, Tensor) or bool(state.isfinite().all())
        assert not isinstance(state, float) or math.isfinite(state)
        parts = []
    for part in parts:
        assert_checkpointable(part)


def assert_close(a: Tensor | None, b: Tensor | None, rtol: float = 1e-5) -> None:
    """Compare relative to the largest value: coordinates near zero suffer from cancellation."""
    if a is None or b is None:
        assert a is None
        assert b is None
        return
    scale = float(b.double().abs().max())
    torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=rtol * scale)


def with_row(row: int, factor: float) -> Callable[[int], Tensor]:
    def rows(n: int) -> Tensor:
        updates = honest(n)
        updates[row % n] = factor * updates[row % n].sign()
        return updates

    return rows


def scaled(n: int) -> Tensor:
    """One client scales its update by a huge factor, as model replacement may."""
    updates = honest(n)
    updates[0] *= 1e30
    return updates


def duplicates(n: int) -> Tensor:
    updates = honest(n)
    updates[: n // 2 + 1] = updates[0]
    return updates


def nearly_equal(n: int, layout: ParameterLayout = SMALL, seed: int = 0) -> Tensor:
    """Rows that differ by 1e-4 of their size: in float32, only in the last ten bits."""
    common = noise(layout.n_params, seed=seed + 3)
    return common * (1 + 1e-4 * noise(n, layout.n_params, seed=seed + 4))


def one_coordinate(n: int) -> Tensor:
    """Only one coordinate is not zero, and equal for all clients but the first."""
    updates = torch.zeros(n, SMALL.n_params, dtype=torch.float64)
    updates[1:, -1] = 1
    return updates


def undoing_the_model(n: int) -> Tensor:
    """Updates after which more than half of the local models are zero."""
    updates = honest(n)
    updates[: n // 2 + 1] = -noise(SMALL.n_params, seed=77)
    return updates


def opposed(n: int) -> Tensor:
    """Rows that sum to zero, so that their mean has no direction."""
    row = noise(SMALL.n_params, seed=5)
    return torch.stack([row * (-1) ** i for i in range(n)]) * (n - n % 2) / n


UPDATES: dict[str, Callable[[int], Tensor]] = {
    "honest": honest,
    "identical": lambda n: honest(1).expand(n, -1).clone(),
    "zero": lambda n: torch.zeros(n, SMALL.n_params, dtype=torch.float64),
    "one_zero_row": with_row(0, 0.0),
    "huge_row": with_row(1, 1e30),
    "largest_row": with_row(-1, 3e38),
    "scaled_row": scaled,
    "mostly_huge": lambda n: torch.cat([honest(n)[: n // 3], honest(n)[n // 3 :] * 1e30]),
    "tiny": lambda n: honest(n) * 1e-30,
    "tiniest_row": with_row(2, 1.4e-45),
    "duplicates": duplicates,
    "nearly_equal": nearly_equal,
    "opposed": opposed,
    "one_coordinate": one_coordinate,
    "undoing_the_model": undoing_the_model,
}


def build(name: str) -> Defense:
    return DEFENSES.build({"name": name})


def run_rounds(
    defense: Defense, rounds: Sequence[Tensor], layout: ParameterLayout = SMALL
) -> list[Aggregate]:
    """Aggregate several rounds of the same clients; return all results."""
    state, outcomes = defense.init(), []
    for index, updates in enumerate(rounds):
        view = view_of(updates, index=index, layout=layout)
        outcome, state = defense.aggregate(updates, state, view)
        assert_checkpointable(state)
        outcomes.append(outcome)
    return outcomes


def supports(defense: Defense, n: int) -> bool:
    try:
        defense.check(n)
    except ValueError:
        return False
    return True


def test_server_view_holds_no_ground_truth() -> None:
    fields = [field.name for field in dataclasses.fields(ServerView)]
    assert fields == ["index", "client_ids", "global_params", "initial_params", "layers", "rng"]


def test_all_defenses_of_the_paper_are_registered() -> None:
    assert set(PAPER_DEFENSES) <= in_tree("defense")


@every_defense
@every_dtype
@pytest.mark.parametrize("rows", UPDATES)
def test_aggregate_is_valid_and_leaves_inputs_unchanged(
    name: str, rows: str, dtype: torch.dtype
) -> None:
    defense = build(name)
    updates = UPDATES[rows](10).to(dtype)
    assert updates.isfinite().all()
    view = view_of(updates)
    before = bits([updates, view.client_ids, view.global_params, view.initial_params])
    version = updates._version
    outcome, _ = defense.aggregate(updates, defense.init(), view)
    assert_valid_aggregate(outcome, updates)
    assert bits([updates, view.client_ids, view.global_params, view.initial_params]) == before
    assert updates._version == version  # not even overwritten by equal values


@every_setting
@pytest.mark.parametrize("rows", UPDATES)
def test_hostile_rounds_do_not_break_later_ones(chosen: dict[str, Any], rows: str) -> None:
    """Two hostile rounds, so that sums over rounds may overflow, then two honest ones."""
    rounds = [UPDATES[rows](10).float()] * 2 + [honest(10, seed=seed).float() for seed in range(2)]
    for outcome, updates in zip(run_rounds(DEFENSES.build(chosen), rounds), rounds, strict=True):
        assert_valid_aggregate(outcome, updates)


@every_defense
@every_dtype
@pytest.mark.parametrize("n", [1, 2, 3])
def test_few_clients_are_supported_or_rejected(name: str, n: int, dtype: torch.dtype) -> None:
    defense = build(name)
    for rows in UPDATES.values():
        updates = rows(n).to(dtype)
        if supports(defense, n):
            for outcome in run_rounds(defense, [updates] * 3):
                assert_valid_aggregate(outcome, updates)
            continue
        with pytest.raises(ValueError, match=rf"\b{n}\b"):
            defense.check(n)
        with pytest.raises(ValueError, match=rf"\b{n}\b"):
            first_round(defense, updates)


@every_defense
@every_dtype
@pytest.mark.parametrize("n", [1, 2, 3, 10])
def test_unanimity(name: str, n: int, dtype: torch.dtype) -> None:
    """If all clients send the same update, the defense returns it."""
    if name in NOT_UNANIMOUS:
        pytest.skip(NOT_UNANIMOUS[name])
    defense = build(name)
    if not supports(defense, n):
        return
    rows = [honest(1, seed=seed)[0].to(dtype) for seed in range(3)]
    outcomes = run_rounds(defense, [row.expand(n, -1).clone() for row in rows])
    for outcome, row in zip(outcomes, rows, strict=True):
        assert_close(outcome.update, row, rtol=4 * torch.finfo(dtype).eps)


@every_defense
@pytest.mark.parametrize("n", [3, 10])
@pytest.mark.parametrize("seed", range(5))
def test_order_of_clients_is_irrelevant(name: str, n: int, seed: int) -> None:
    """Three rounds reveal state that is kept by position instead of client id."""
    defense = build(name)
    if not supports(defense, n):
        return
    shuffle = random.Random(seed)
    state, state_shuffled = defense.init(), defense.init()
    for index, ids in enumerate(ROUNDS):
        updates = honest(n, seed=100 * seed + index).float()
        updates[: n // 3] *= 5  # gives defenses someone to reject
        places = torch.tensor(shuffle.sample(range(n), n))
        ids_shuffled = torch.tensor(ids[:n])[places].tolist()
        shuffled_view = view_of(updates, ids_shuffled, index)
        plain, state = defense.aggregate(updates, state, view_of(updates, ids[:n], index))
        shuffled, state_shuffled = defense.aggregate(updates[places], state_shuffled, shuffled_view)
        assert_close(shuffled.scores, None if plain.scores is None else plain.scores[places])
        assert list(shuffled.details) == list(plain.details)
        for column, values in plain.details.items():
            assert_close(shuffled.details[column], values[places])
        if name in TIES_BY_ORDER and _best_score_ties(plain):
            continue
        assert_close(shuffled.update, plain.update)
        assert_close(shuffled.weights, plain.weights[places])
        assert (shuffled.accepted is None) == (plain.accepted is None)
        if plain.accepted is not None and shuffled.accepted is not None:
            assert torch.equal(shuffled.accepted, plain.accepted[places])


def _best_score_ties(outcome: Aggregate) -> bool:
    assert outcome.scores is not None
    best, second = outcome.scores.sort().values[:2].tolist()
    return bool(second - best <= 1e-9 * second)


@every_defense
def test_nearly_equal_rows_are_distinguished(name: str) -> None:
    """float32 input gives the result of the same numbers in float64."""
    defense = build(name)
    state_single, state_double = defense.init(), defense.init()
    for index in range(2):
        updates = nearly_equal(30, LARGE, seed=10 * index).float()
        view, same = (view_of(updates, index=index, layout=LARGE) for _ in range(2))
        same = dataclasses.replace(
            same,
            global_params=view.global_params.double(),
            initial_params=view.initial_params.double(),
        )
        single, state_single = defense.aggregate(updates, state_single, view)
        double, state_double = defense.aggregate(updates.double(), state_double, same)
        assert_close(single.weights, double.weights, rtol=1e-3)
        assert_close(single.scores, double.scores, rtol=1e-3)
        if single.accepted is not None and double.accepted is not None:
            assert torch.equal(single.accepted, double.accepted)
        if name not in NOISY:
            assert_close(single.update, double.update, rtol=1e-6)


@every_defense
def test_same_seed_same_bits(name: str) -> None:
    """A defense neither depends on global random generators nor changes them."""
    rounds = [honest(10, seed=seed).float() for seed in range(3)]
    first = run_rounds(build(name), rounds)
    torch.manual_seed(123)
    np.random.seed(123)
    random.seed(123)
    before = global_generators()
    assert bits(run_rounds(build(name), rounds)) == bits(first)
    assert global_generators() == before


def global_generators() -> list[Any]:
    numpy_state: Any = np.random.get_state()
    return [
        bits(torch.get_rng_state()),
        numpy_state[1].tobytes(),
        numpy_state[2:],
        random.getstate(),
    ]


@every_setting
def test_state_survives_a_checkpoint(chosen: dict[str, Any]) -> None:
    defense = DEFENSES.build(chosen)
    state, restored = defense.init(), defense.init()
    assert_checkpointable(state)
    for index, ids in enumerate(ROUNDS):
        updates = honest(len(ids), seed=index).float()
        file = io.BytesIO()
        torch.save(restored, file)
        file.seek(0)
        restored = torch.load(file, weights_only=True)
        expected, state = defense.aggregate(updates, state, view_of(updates, ids, index))
        found, restored = defense.aggregate(updates, restored, view_of(updates, ids, index))
        assert bits(found) == bits(expected)
        assert bits(restored) == bits(state)
        assert_checkpointable(state)


@pytest.mark.parametrize(
    "state",
    [
        {1, 2},
        {"ids": {1}},
        [frozenset()],
        ({"a": [np.float64(1)]},),
        {"sum": torch.tensor([1.0, math.inf])},
        {"sum": math.nan},
        {(1, 2): 0},
        {"memory": 2j},
    ],
    ids=str,
)
def test_assert_checkpointable_finds_invalid_state(state: Any) -> None:
    with pytest.raises(AssertionError):
        assert_checkpointable(state)
    assert_checkpointable({3: (torch.zeros(2), [1, 2.0, None, True, {"a": "b"}])})


@every_setting
def test_defense_keeps_no_state_outside_its_state(chosen: dict[str, Any]) -> None:
    """Repeating a round from one state gives the same result and changes neither state nor self."""
    defense = DEFENSES.build(chosen)
    state = defense.init()
    for index, ids in enumerate(ROUNDS):
        updates = honest(len(ids), seed=index).float()
        before = bits(copy.deepcopy(state))
        first, after = defense.aggregate(updates, state, view_of(updates, ids, index))
        assert bits(state) == before
        again, after_again = defense.aggregate(updates, state, view_of(updates, ids, index))
        assert bits([again, after_again]) == bits([first, after])
        state = after


@every_setting
@pytest.mark.parametrize("n", [1, 2, 3, 10, 30])
def test_warning_is_one_line_or_none(chosen: dict[str, Any], n: int) -> None:
    warning = DEFENSES.build(chosen).warning(n)
    assert warning is None or (warning and "\n" not in warning)


NOT_FINITE = [math.nan, math.inf, -math.inf]
OUT_OF_RANGE: dict[str, dict[str, list[Any]]] = {
    "krum": {"f": [-1, -20], "m": [0, -2, "best"]},
    "foolsgold": {"layers": ["last", ""], "kappa": [-1.0, *NOT_FINITE]},
    "auror": {
        "alpha": [-0.1, *NOT_FINITE],
        "layers": ["last", ""],
        "tau": [-0.1, 1.1, *NOT_FINITE],
        "rounds": [0, -3],
    },
    "afa": {
        "alpha0": [0, -3],
        "beta0": [0, -3],
        "xi": [-0.5, *NOT_FINITE],
        "xi_step": [-0.5, *NOT_FINITE],
        "block": [-0.1, 1.1, *NOT_FINITE],
    },
    "dp": {"clip": [0.0, -1.0, *NOT_FINITE], "noise": [-0.1, *NOT_FINITE]},
    "flame": {"noise": [-0.1, *NOT_FINITE]},
    "baybfed": {
        "weights": ["updates", ""],
        "cosine": ["sine", ""],
        "scoring": ["rounds", ""],
        "cold_start": ["stand", ""],
        "tau": ["server", ""],
        "assign": ["mean", ""],
        "persist": ["sometimes"],
        "score": ["loss", ""],
        "mu0": NOT_FINITE,
        "sigma0_sq": [0.0, -9.0, "best", *NOT_FINITE],
        "error_floor": [-0.5, *NOT_FINITE],
        "max_clusters": [0, -1],
        "filter": ["none", ""],
        "threshold": ["median", ""],
        "separation": [0.0, 1.0, *NOT_FINITE],
        "spread": [-0.1, *NOT_FINITE],
        "c": [0.0, -5.0, *NOT_FINITE],
        "bins": [0, -1],
    },
}


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        (name, field, value)
        for name, fields in OUT_OF_RANGE.items()
        for field, values in fields.items()
        for value in values
    ],
)
def test_settings_out_of_range_are_rejected(name: str, field: str, value: Any) -> None:
    """The error is one line that names the setting and its value."""
    with pytest.raises(UserError, match=rf"\b{field}\b") as caught:
        DEFENSES.build({"name": name, field: value})
    message = str(caught.value)
    assert "\n" not in message
    assert str(value) in message


@pytest.mark.parametrize("name", PAPER_DEFENSES)
def test_every_setting_of_the_papers_defenses_is_validated(name: str) -> None:
    fields = {field.name for field in dataclasses.fields(DEFENSES.get(name))}  # type: ignore[arg-type]
    assert fields == set(OUT_OF_RANGE.get(name, {}))


Patch: Any = BACKDOORS.get("patch")
PATCHES = (Patch(target=3, corner="top_left"), Patch(target=8, corner="bottom_right", size=2))


def samples(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw images with values up to 200, so that a trigger of 255 shows, and labels 0 to 9."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 201, (n, 1, 8, 8), generator=rng, dtype=torch.uint8)
    return x, torch.randint(0, 10, (n,), generator=rng)


def poisoning(pdr: float, slot: int = 0, seed: int = 0, backdoors: Any = PATCHES[:1]) -> Poisoning:
    return Poisoning(slot, backdoors, pdr, 10, torch.Generator().manual_seed(seed))


def attack_view(global_params: Tensor, n_malicious: int = 3) -> AttackView:
    """Return a view with everything that an attack may request."""
    dtype = global_params.dtype
    return AttackView(
        index=0,
        global_params=global_params,
        layers=SMALL.layers,
        n_clients=10,
        n_malicious=n_malicious,
        server_lr=0.5,
        rng=torch.Generator().manual_seed(0),
        clean_update=honest(1, seed=5)[0].to(dtype),
        benign=honest(10 - n_malicious, seed=6).to(dtype),
    )


def changed(a: Tensor, b: Tensor) -> Tensor:
    return (a != b).flatten(1).any(dim=1)


@every_targeted
@settings(derandomize=True, deadline=None)
@given(n=st.integers(1, 60), pdr=st.floats(0, 1), seed=st.integers(0, 1000))
@example(n=7, pdr=0.0, seed=0)
@example(n=7, pdr=1.0, seed=0)
@example(n=5, pdr=0.5, seed=0)  # halves round up
@example(n=1, pdr=0.4999, seed=0)
def test_poison_changes_exactly_the_requested_share(
    name: str, n: int, pdr: float, seed: int
) -> None:
    attack = ATTACKS.get(name)()
    x, y = samples(n, seed)
    before = bits([x, y])
    poisoned_x, poisoned_y = attack.poison(x, y, poisoning(pdr, seed=seed))
    assert bits([x, y]) == before
    assert (poisoned_x.shape, poisoned_x.dtype) == (x.shape, x.dtype)
    assert (poisoned_y.shape, poisoned_y.dtype) == (y.shape, y.dtype)
    stamped = changed(poisoned_x, x)
    assert int(stamped.sum()) == math.floor(pdr * n + 0.5)
    assert (poisoned_y[stamped] == PATCHES[0].target).all()
    assert torch.equal(poisoned_y[~stamped], y[~stamped])


@every_targeted
def test_poison_depends_only_on_its_generator(name: str) -> None:
    attack = ATTACKS.get(name)()
    x, y = samples(200)
    torch.manual_seed(1)
    first = attack.poison(x, y, poisoning(0.5, seed=4))
    torch.manual_seed(2)
    assert bits(list(attack.poison(x, y, poisoning(0.5, seed=4)))) == bits(list(first))
    assert not torch.equal(attack.poison(x, y, poisoning(0.5, seed=5))[0], first[0])


@pytest.mark.parametrize("name", ["constrain_and_scale", "edge_case", "adaptive_baybfed"])
@pytest.mark.parametrize("slot", range(5))
def test_backdoors_are_assigned_by_slot(name: str, slot: int) -> None:
    attack = ATTACKS.get(name)()
    x, y = samples(50)
    poisoned_x, poisoned_y = attack.poison(x, y, poisoning(0.4, slot, backdoors=PATCHES))
    stamped = changed(poisoned_x, x)
    assert int(stamped.sum()) == 20
    assert (poisoned_y[stamped] == PATCHES[slot % 2].target).all()
    assert torch.equal(poisoned_x[stamped], PATCHES[slot % 2].stamp(x[stamped]))


@every_attack
@pytest.mark.parametrize("moved", [True, False], ids=["away", "at_global"])
def test_objective_is_differentiable(name: str, moved: bool) -> None:
    """Also at the first step, where parameters equal the global ones."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    layout = ParameterLayout(network)
    global_params = layout.read_params() + (0.1 if moved else 0)
    before = bits(global_params)
    loss = nn.functional.cross_entropy(network(torch.randn(16, 6)), torch.arange(16) % 3)
    attack = ATTACKS.get(name)()
    view = dataclasses.replace(attack_view(global_params), clean_update=torch.randn(53))
    objective = attack.objective(loss, layout.params, view)
    assert objective.shape == ()
    assert objective.dtype == loss.dtype
    assert objective.isfinite()
    objective.backward()
    for param in layout.params:
        assert param.grad is not None
        assert param.grad.isfinite().all()
        assert param.grad.abs().max() > 0
    assert bits(global_params) == before


@every_attack
@every_dtype
def test_craft_is_deterministic_and_leaves_inputs_unchanged(name: str, dtype: torch.dtype) -> None:
    """It does not use global random generators, either."""
    attack = ATTACKS.get(name)()
    update = honest(1)[0].to(dtype)
    view = attack_view(noise(SMALL.n_params, seed=1).to(dtype))
    before = bits([update, view.global_params, view.clean_update])
    generators = global_generators()
    sent = attack.craft(update, view)
    assert bits([update, view.global_params, view.clean_update]) == before
    assert (sent.shape, sent.dtype) == (update.shape, dtype)
    assert sent.isfinite().all()
    again = attack.craft(update, attack_view(view.global_params))
    assert bits(again) == bits(sent)
    assert global_generators() == generators


@every_attack
@every_dtype
@pytest.mark.parametrize("n_malicious", [1, 3, 9, 10])
def test_collude_is_valid_and_leaves_inputs_unchanged(
    name: str, n_malicious: int, dtype: torch.dtype
) -> None:
    attack = ATTACKS.get(name)()
    updates = honest(n_malicious).to(dtype)
    view = attack_view(noise(SMALL.n_params, seed=1).to(dtype), n_malicious)
    before = bits([updates, view.global_params, view.benign])
    sent = attack.collude(updates, view)
    assert bits([updates, view.global_params, view.benign]) == before
    assert len(sent) == n_malicious
    for row in sent:
        assert (row.shape, row.dtype) == (updates[0].shape, dtype)
        assert row.isfinite().all()


@every_attack
def test_project_changes_only_the_parameters(name: str) -> None:
    params = [nn.Parameter(part.clone()) for part in honest(1)[0].split([30, 23])]
    view = attack_view(noise(SMALL.n_params, seed=1))
    before = bits([view.global_params, view.clean_update])
    ATTACKS.get(name)().project(params, view)
    assert bits([view.global_params, view.clean_update]) == before
    for param in params:
        assert param.isfinite().all()
        assert param.requires_grad
        assert param.grad is None


@every_attack
def test_targeted_attacks_and_none_have_backdoors(name: str) -> None:
    """Untargeted attacks have none. `none` has one, so that BA is measured without an attack."""
    backdoors = ATTACKS.get(name)().backdoor_settings([{"name": "patch"}])
    assert bool(backdoors) == (name in TARGETED or name == "none")
    for backdoor in backdoors:
        BACKDOORS.build(backdoor)


@every_targeted
def test_targeted_attack_without_a_backdoor_is_rejected(name: str) -> None:
    with pytest.raises(ValueError, match="backdoors must be one"):
        ATTACKS.get(name)().check([], Spec("images", (1, 28, 28), 10))


@every_targeted
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *[("epochs", value) for value in (0, -3)],
        *[("lr", value) for value in (0.0, -0.1, math.nan, math.inf)],
        *[("lr_decay", value) for value in (0.0, -1.0, math.nan, math.inf)],
        *[("lr_decay_at", value) for value in ([1.5], [0.2, -0.1], [math.nan])],
    ],
)
def test_training_settings_of_attacks_are_validated(name: str, setting: str, value: Any) -> None:
    assert_rejected(name, setting, value)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("value", [0, -1.5, "bound", "2", math.nan, math.inf])
def test_gamma_is_validated(name: str, value: Any) -> None:
    assert_rejected(name, "gamma", value)


def assert_rejected(name: str, setting: str, value: Any) -> None:
    """The error is one line that names the setting and its value."""
    with pytest.raises(UserError, match=rf"{setting}\b.*") as caught:
        ATTACKS.build({"name": name, setting: value})
    assert str(value) in str(caught.value)
    assert "\n" not in str(caught.value)


CONF = Path(importlib.import_module("fedbench.conf").__path__[0])


@functools.cache
def composed(kind: str, name: str) -> dict[str, Any]:
    """Compose the config group `kind` as `python -m fedbench kind=name` does."""
    register_schema()
    with initialize_config_module("fedbench.conf", version_base="1.3"):
        config = compose("config", overrides=[f"{kind}={name}"])
    group = OmegaConf.to_container(config[kind], resolve=True)
    assert isinstance(group, dict)
    return {str(key): value for key, value in group.items()}


def in_tree(kind: str) -> set[str]:
    """Names of plugins that ship with fedbench; installed ones have config files elsewhere."""
    registry = REGISTRIES[kind]
    return {
        name for name in registry.names() if registry.get(name).__module__.startswith("fedbench.")
    }


@pytest.mark.parametrize("kind", REGISTRIES)
def test_config_files_match_the_registered_names(kind: str) -> None:
    files = {path.stem for path in (CONF / kind).glob("*.yaml")}
    assert files - VARIANTS.get(kind, set()) == in_tree(kind)


@pytest.mark.parametrize("kind", ["defense", "attack"])
def test_files_match_the_registered_names(kind: str) -> None:
    folder = Path(importlib.import_module(f"fedbench.{kind}s").__path__[0])
    assert {path.stem for path in folder.glob("[!_]*.py")} == in_tree(kind)


@pytest.mark.parametrize(("kind", "name"), PLUGINS)
def test_plugin_is_defined_in_the_file_of_its_name(kind: str, name: str) -> None:
    cls = REGISTRIES[kind].get(name)
    assert cls.__module__.rpartition(".")[2] == name


@pytest.mark.parametrize(("kind", "name"), CHOICES)
def test_yaml_contains_the_plugins_name(kind: str, name: str) -> None:
    text = yaml.safe_load((CONF / kind / f"{name}.yaml").read_text("utf-8"))
    assert text.get(kind, text)["name"] == name
    assert composed(kind, name)["name"] == name


@pytest.mark.parametrize(("kind", "name"), CHOICES)
def test_yaml_contains_every_setting_with_its_default(kind: str, name: str) -> None:
    cls = REGISTRIES[kind].get(name)
    defaults = OmegaConf.to_container(OmegaConf.structured(cls))
    given = {key: value for key, value in composed(kind, name).items() if key != "name"}
    assert given == defaults


@pytest.mark.parametrize(("kind", "name"), CHOICES)
def test_plugin_is_a_frozen_dataclass_with_a_docstring(kind: str, name: str) -> None:
    cls = REGISTRIES[kind].get(name)
    assert dataclasses.is_dataclass(cls)
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    signature = f"{cls.__name__}("  # start of the docstring that dataclass generates
    assert kind == "tracker" or not (cls.__doc__ or signature).startswith(signature)


@pytest.mark.parametrize("name", BACKDOORS.names())
def test_backdoor_is_a_documented_frozen_dataclass(name: str) -> None:
    cls = BACKDOORS.get(name)
    module = importlib.import_module(cls.__module__)
    assert module.__name__ == f"fedbench.backdoors.{name}"
    assert dataclasses.is_dataclass(cls)
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert "https://" in (module.__doc__ or "")
    assert BACKDOORS.build({"name": name}) == cls()


@pytest.mark.parametrize(("kind", "name"), PLUGINS)
def test_plugin_links_to_its_paper(kind: str, name: str) -> None:
    cls = REGISTRIES[kind].get(name)
    module = importlib.import_module(cls.__module__)
    assert module.__doc__
    assert name == "none" or "https://" in module.__doc__
    assert isinstance(cls.version, int)
    assert cls.version >= 1
