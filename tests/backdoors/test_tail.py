"""tail: the least likely samples under a Gaussian, compared with scipy's density."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric import Fabric
from scipy import stats
from torch import Tensor, nn

from fedbench.attack import ATTACKS
from fedbench.backdoor import BACKDOORS, BackdoorContext, BackdoorSamples
from fedbench.backdoors.tail import Tail
from fedbench.config import RunConfig
from fedbench.data import Dataset, Images, Kind, Spec
from fedbench.engine.rank_context import RankContext
from fedbench.errors import UserError
from fedbench.federation import Federation

SOURCE, TARGET = 5, 0


def context(
    train: np.ndarray,
    test: np.ndarray,
    y_train: list[int] | None = None,
    y_test: list[int] | None = None,
    held: list[int] | None = None,
) -> BackdoorContext:
    """Samples are row numbers, training before test; their features are the given rows."""
    n, m = len(train), len(test)
    table = torch.from_numpy(np.concatenate([train, test])).float()
    data = Images(
        "made",
        torch.arange(n)[:, None],
        torch.tensor([SOURCE] * n if y_train is None else y_train),
        torch.arange(n, n + m)[:, None],
        torch.tensor([SOURCE] * m if y_test is None else y_test),
        n_classes=10,
        mean=0.0,
        std=1.0,
    )
    indices = torch.arange(n) if held is None else torch.tensor(held, dtype=torch.long)
    return BackdoorContext(data, indices, features=lambda x: table[x[:, 0]])


def tail(rate: float = 0.1) -> Tail:
    return Tail(source=SOURCE, target=TARGET, rate=rate)


def chosen(ready: BackdoorSamples, n: int) -> tuple[list[int], list[int]]:
    """Indices of the edge cases among the n training samples and among the test samples."""
    return ready.x_train[:, 0].tolist(), [int(number) - n for number in ready.x_test[:, 0]]


def likelihood(rows: np.ndarray, population: np.ndarray) -> np.ndarray:
    """Log density by scipy under the Gaussian defined in the docstring of tail."""
    covariance = np.cov(population, rowvar=False, ddof=0).reshape(population.shape[1], -1)
    ridge = 0.01 * np.trace(covariance) / len(covariance)
    fitted = stats.multivariate_normal(
        population.mean(axis=0), covariance + ridge * np.eye(len(covariance))
    )
    return np.atleast_1d(fitted.logpdf(rows))


def assert_least_likely(
    edge: list[int], rows: np.ndarray, population: np.ndarray, rate: float
) -> None:
    """Edge cases are a share `rate` of the rows, and no other row is less likely.

    Compares likelihoods, not indices: ties are broken by rounding.
    """
    assert len(set(edge)) == len(edge)
    assert len(edge) == max(int(Fraction(rate) * len(rows) + Fraction(1, 2)), 1)
    values = likelihood(rows, population)
    others = np.delete(values, edge)
    assert not len(others) or values[edge].max() <= others.min() + 1e-8 * np.abs(values).max()


def test_by_hand() -> None:
    # Training features (-1, 0) and (1, 0), twice: mean 0, variances 1 and 0 with mean 0.5. Adding a
    # hundredth of that gives 1.005 and 0.005. Squared distances: (1, 0) has 1 / 1.005 = 0.995,
    # (0, 0.0706) has 0.00498436 / 0.005 = 0.997, (0, 0.0705) has 0.00497025 / 0.005 = 0.994.
    train = np.array([[-1.0, 0], [1, 0], [-1, 0], [1, 0]])
    for second, farthest in ((0.0706, 1), (0.0705, 0)):
        test = np.array([[1.0, 0], [0, second]])
        ready = tail(rate=0.5).prepare(context(train, test))
        assert chosen(ready, 4)[1] == [farthest]
        assert ready.y_test.tolist() == [TARGET]


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    st.integers(2, 40),
    st.integers(1, 30),
    st.integers(1, 12),
    st.sampled_from([0.0625, 0.125, 0.25, 0.375, 0.5, 0.75, 1.0]),
    st.integers(0, 2**32),
)
def test_the_least_likely_of_the_class_are_chosen(
    k: int, m: int, n_features: int, rate: float, seed: int
) -> None:
    """Includes more features than samples, very different scales and a mean far from zero."""
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(n_features, n_features)) * 10 ** rng.uniform(-1, 1, n_features)
    center = 10 * rng.normal(size=n_features)
    train, test = (
        (rng.normal(size=(size, n_features)) @ mixing + center).astype(np.float32)
        for size in (k, m)
    )
    ready = tail(rate=rate).prepare(context(train, test))
    population = train.astype(np.float64)
    edge, edge_test = chosen(ready, k)
    assert_least_likely(edge, population, population, rate)
    assert_least_likely(edge_test, test.astype(np.float64), population, rate)
    assert ready.y_train.tolist() == [TARGET] * len(edge)
    assert ready.y_test.tolist() == [TARGET] * len(edge_test)


@pytest.mark.parametrize(
    ("k", "rate", "n_edge"),
    [(10, 0.1, 1), (10, 0.25, 3), (10, 0.24, 2), (4, 0.1, 1), (4, 0.01, 1), (7, 1.0, 7)],
)
def test_the_share_is_rounded_to_at_least_one(k: int, rate: float, n_edge: int) -> None:
    features = np.random.default_rng(0).normal(size=(k, 2))
    ready = tail(rate=rate).prepare(context(features, features))
    assert len(ready.x_train) == len(ready.x_test) == n_edge


def test_only_the_malicious_clients_samples_of_the_class_count() -> None:
    """Other clients and other classes affect neither the choice nor the Gaussian."""
    rng = np.random.default_rng(3)
    train, test = rng.normal(size=(60, 3)), rng.normal(size=(40, 3))
    y_train, y_test = (rng.choice([SOURCE, 1, 2], size).tolist() for size in (60, 40))
    held = rng.permutation(60)[:30].tolist()
    theirs = [i for i in held if y_train[i] == SOURCE]
    tested = [i for i in range(40) if y_test[i] == SOURCE]
    for other in set(range(60)) - set(theirs):
        train[other] *= 1000  # if used, it would be chosen first and make the others likely
    for other in set(range(40)) - set(tested):
        test[other] *= 1000
    ready = tail(rate=0.25).prepare(context(train, test, y_train, y_test, held))
    edge, edge_test = chosen(ready, 60)
    assert_least_likely([theirs.index(i) for i in edge], train[theirs], train[theirs], 0.25)
    assert_least_likely([tested.index(i) for i in edge_test], test[tested], train[theirs], 0.25)


def test_source_and_target_are_used() -> None:
    features = np.random.default_rng(0).normal(size=(8, 2))
    labels = [3, 5, 3, 5, 3, 5, 3, 5]
    ready = Tail(source=3, target=7, rate=1.0).prepare(context(features, features, labels, labels))
    edge, edge_test = chosen(ready, 8)
    assert sorted(edge) == sorted(edge_test) == [0, 2, 4, 6]
    assert ready.y_train.tolist() == ready.y_test.tolist() == [7] * 4


def test_with_equal_training_samples_the_farthest_test_samples_are_chosen() -> None:
    train = np.full((6, 3), 2.5)
    test = np.array([[2.5, 2.5, 2.5], [2.5, 9, 2.5], [2.5, 2.5, 3], [0, 0, -9]])
    edge, edge_test = chosen(tail(rate=0.5).prepare(context(train, test)), 6)
    assert len(set(edge)) == 3
    assert edge_test == [3, 1]


def test_ties_are_broken_by_order() -> None:
    """Every run and every process must choose the same samples."""
    train = np.array([[1.0], [-1], [1], [-1], [1], [-1]])
    edge, edge_test = chosen(tail(rate=0.5).prepare(context(train, train)), 6)
    assert edge == edge_test == [0, 1, 2]


@pytest.mark.parametrize(
    ("held", "n_held", "y_test", "n_test"),
    [
        ([], 0, [5, 5], 2),
        ([0], 1, [5, 5], 2),
        ([1, 2], 0, [5, 5], 2),
        ([0, 3], 2, [1, 2], 0),
    ],
)
def test_too_few_samples_are_an_error(
    held: list[int], n_held: int, y_test: list[int], n_test: int
) -> None:
    features = np.random.default_rng(0).normal(size=(4, 2))
    message = (
        "^tail needs at least 2 training samples of class 5 on malicious clients "
        f"and 1 test sample, got {n_held} and {n_test}$"
    )
    with pytest.raises(ValueError, match=message):
        tail().prepare(context(features, features[:2], [5, 1, 2, 5], y_test, held))


def test_two_training_samples_and_one_test_sample_suffice() -> None:
    features = np.random.default_rng(0).normal(size=(2, 5))
    ready = tail().prepare(context(features, features[:1]))
    assert len(ready.x_train) == len(ready.x_test) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": 4, "target": 4}, "source must differ from target=4"),
        ({"rate": 0.0}, r"rate must be above 0 and at most 1, got 0\.0"),
        ({"rate": -0.5}, r"got -0\.5"),
        ({"rate": 1.01}, r"got 1\.01"),
        ({"rate": float("nan")}, "got nan"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tail(**settings)
    with pytest.raises(UserError, match=message):
        BACKDOORS.build({"name": "tail", **settings})


def test_classes_out_of_range_are_refused() -> None:
    spec = Spec("made", (1, 28, 28), 10)
    Tail(source=9, target=0).check(spec)
    for source in (-1, 10):
        with pytest.raises(ValueError, match=rf"source must be a class 0\.\.9, got {source}"):
            Tail(source=source, target=0).check(spec)
        with pytest.raises(ValueError, match=rf"target must be a class 0\.\.9, got {source}"):
            Tail(source=5, target=source).check(spec)


def test_sequences_are_refused() -> None:
    """They have one label per word, so a sample has no class."""
    with pytest.raises(ValueError, match=r"\(64,\)"):
        Tail().check(Spec("reddit", (64,), 50_000, Kind.SEQUENCES))


class Odd(nn.Module):
    """Layers defined in a different order than used, with dropout before the last."""

    def __init__(self, n_pixels: int) -> None:
        super().__init__()
        self.out = nn.Linear(7, 10)
        self.flatten = nn.Flatten()
        self.dropout = nn.Dropout(0.5)
        self.hidden = nn.Linear(n_pixels, 7)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.dropout(self.hidden(self.flatten(x)).relu()))  # type: ignore[no-any-return]


def images(n: int) -> Dataset:
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (n, 1, 5, 5), generator=rng, dtype=torch.uint8)
    y = torch.arange(n) % 10
    return Images("made", x, y, x[:50], y[:50], n_classes=10, mean=0.5, std=0.25)


def rank_context(dataset: Dataset, network: nn.Module, pmr: float = 0.4) -> RankContext:
    config = RunConfig(n_clients=10, pmr=pmr)
    fabric = Fabric(accelerator="cpu", devices=1)
    attack = ATTACKS.build({"name": "constrain_and_scale"})
    return RankContext(config, dataset, network, attack, fabric)


def test_features_are_the_inputs_of_the_last_linear_layer() -> None:
    """They use the given parameters, not those in the module, and no dropout."""
    torch.manual_seed(0)
    data = images(2300)  # more than one batch
    clients = rank_context(data, Odd(25))
    params, buffers = clients.replica.layout.read_params(), clients.replica.layout.read_buffers()
    hidden = params[10 * 8 :]  # after weights and biases of the output layer
    weight, bias = hidden[: 7 * 25].view(7, 25), hidden[7 * 25 : 7 * 26]
    ready = clients.backdoor_context(params, buffers)
    clients.replica.layout.write(torch.randn_like(params), buffers)
    features = ready.features(data.x_train)
    by_hand = (((data.x_train.flatten(1).float() / 255 - 0.5) / 0.25) @ weight.T + bias).relu()
    torch.testing.assert_close(features, by_hand, rtol=1e-4, atol=1e-4)
    assert not features.requires_grad
    assert torch.equal(ready.features(data.x_train), features)
    torch.testing.assert_close(ready.features(data.x_train[:3]), features[:3])
    assert not any(layer._forward_pre_hooks for layer in clients.replica.module.modules())


def test_a_model_without_a_linear_layer_has_no_features() -> None:
    network = nn.Sequential(nn.Conv2d(1, 10, 5), nn.Flatten())
    clients = rank_context(images(100), network)
    ready = clients.backdoor_context(
        clients.replica.layout.read_params(), clients.replica.layout.read_buffers()
    )
    with pytest.raises(UserError, match="inputs of the last linear layer; found none"):
        tail().prepare(ready)


@pytest.mark.parametrize("pmr", [0.0, 0.2, 0.4, 1.0])
def test_malicious_samples_are_those_of_malicious_clients(pmr: float) -> None:
    clients = rank_context(images(400), Odd(25), pmr)
    ready = clients.backdoor_context(
        clients.replica.layout.read_params(), clients.replica.layout.read_buffers()
    )
    held = [
        i for client in clients.selection.malicious for i in clients.data.shards[client].tolist()
    ]
    assert len(clients.selection.malicious) == round(10 * pmr)
    assert sorted(ready.malicious_samples.tolist()) == sorted(held)
    assert ready.dataset is clients.dataset


def test_in_a_federation(federation: Callable[..., Federation]) -> None:
    """Edge cases come from the malicious clients' images, BA from test images of the class."""
    backdoor = {"name": "tail", "source": SOURCE, "target": TARGET, "rate": 0.25}
    attack = ATTACKS.build({"name": "constrain_and_scale", "backdoors": [backdoor]})
    torch.manual_seed(1)
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))
    made = federation(attack=attack, network=network)
    clients, data = made.rank_context, made.rank_context.dataset
    (backdoor,) = clients.data.backdoors
    assert isinstance(backdoor, BackdoorSamples)
    own = torch.cat([clients.data.shards[client] for client in sorted(clients.selection.malicious)])
    mine = data.x_train[own[data.y_train[own] == SOURCE]]
    test = data.x_test[data.y_test == SOURCE]
    with torch.no_grad():
        features, features_test = (network[:-1](data.decode(x)).double() for x in (mine, test))
    for x, samples, rows in (
        (backdoor.x_train, mine, features),
        (backdoor.x_test, test, features_test),
    ):
        known = [image.numpy().tobytes() for image in samples]
        edge = [known.index(image.numpy().tobytes()) for image in x]
        assert_least_likely(edge, rows.numpy(), features.numpy(), 0.25)
    (evaluation,) = made.rank_context.evaluator.triggered
    assert evaluation.x is backdoor.x_test
    assert evaluation.expected.tolist() == [TARGET] * len(evaluation.x)
