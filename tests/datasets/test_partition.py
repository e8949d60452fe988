"""fedbench.datasets.partition: the properties of every partition, for any labels and settings."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbench.config import RunConfig
from fedbench.data import Images
from fedbench.datasets.partition import (
    MAX_DRAWS,
    PARTITIONS,
    Ints,
    Partition,
    at_random,
    by_dirichlet,
    by_main_class,
    by_owner,
    client_indices,
)
from fedbench.errors import UserError


def balanced(n_classes: int, per_class: int) -> Ints:
    return np.tile(np.arange(n_classes), per_class)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def distinct(values: Ints) -> list[int]:
    return sorted(set(values.tolist()))


def counts(labels: Ints, clients: list[Ints]) -> Ints:
    """Number of samples per client and class: [n_clients, C]."""
    n_classes = int(labels.max()) + 1
    return np.stack([np.bincount(labels[client], minlength=n_classes) for client in clients])


def assert_disjoint(clients: list[Ints], n: int) -> None:
    everything = np.concatenate(clients)
    assert everything.dtype == np.int64
    assert len(distinct(everything)) == len(everything)
    assert everything.min() >= 0
    assert everything.max() < n


# Labels, and a number of clients they can be split over.
cases = st.lists(st.integers(0, 6), min_size=1, max_size=300).flatmap(
    lambda values: st.tuples(st.just(values), st.integers(1, min(40, len(values))))
)
seeds = st.integers(0, 2**32 - 1)


@settings(deadline=None)
@given(cases, st.floats(0, 1), seeds)
def test_main_class_for_any_labels(case: tuple[list[int], int], non_iid: float, seed: int) -> None:
    values, n_clients = case
    labels = np.array(values)
    classes = distinct(labels)
    class_sizes = np.bincount(labels)[classes]
    main_class = np.arange(n_clients) % len(classes)
    n_sharing = np.bincount(main_class, minlength=len(classes))
    try:
        clients = by_main_class(labels, n_clients, non_iid, rng(seed))
    except UserError:
        assert (n_sharing > class_sizes).any()
        return
    assert len(clients) == n_clients
    assert_disjoint(clients, len(labels))
    (size,) = {len(client) for client in clients}
    assert 1 <= size <= len(labels) // n_clients
    n_main = int(non_iid * size + 0.5)
    assert abs(n_main - non_iid * size) <= 0.5
    held = counts(labels, clients)[:, classes]  # [n_clients, C]
    assert (held[np.arange(n_clients), main_class] >= n_main).all()
    # Without the main-class samples, all clients together hold the proportional number, rounded.
    rest = held.sum(0) - n_sharing * n_main
    exact = n_clients * (size - n_main) * class_sizes / len(labels)
    assert (np.abs(rest - exact) < 1 + 1e-4).all()


@settings(deadline=None)
@given(cases, st.floats(0, 1))
def test_main_class_size_is_the_largest_that_fits(
    case: tuple[list[int], int], non_iid: float
) -> None:
    values, n_clients = case
    labels = np.array(values)
    class_sizes = [values.count(c) for c in sorted(set(values))]
    n_sharing = [len(range(c, n_clients, len(class_sizes))) for c in range(len(class_sizes))]

    def fits(size: int) -> bool:
        n_main = int(non_iid * size + 0.5)
        n_rest = n_clients * (size - n_main)
        n = len(labels)
        return all(
            k * n_main * n + n_rest * s <= s * n
            for k, s in zip(n_sharing, class_sizes, strict=True)
        )

    want = max((s for s in range(1, len(labels) // n_clients + 1) if fits(s)), default=0)
    if want == 0:
        with pytest.raises(UserError, match="share a main class"):
            by_main_class(labels, n_clients, non_iid, rng())
    else:
        assert len(by_main_class(labels, n_clients, non_iid, rng())[0]) == want


@pytest.mark.parametrize("non_iid", [0, 0.3, 0.5, 0.7, 1])
@pytest.mark.parametrize("n_clients", [10, 30, 50, 100])
def test_balanced_classes_lose_nothing(n_clients: int, non_iid: float) -> None:
    labels = balanced(10, 1000)
    clients = by_main_class(labels, n_clients, non_iid, rng())
    assert_disjoint(clients, len(labels))
    assert {len(client) for client in clients} == {10_000 // n_clients}


def test_main_class_by_hand() -> None:
    # 2 classes of 8 and 4 clients of 4 samples, half from the main class: 2 of class i % 2, and 2
    # from the remaining pool of 4 + 4.
    labels = balanced(2, 8)
    held = counts(labels, by_main_class(labels, 4, 0.5, rng()))
    assert held.sum(1).tolist() == [4] * 4
    assert held.sum(0).tolist() == [8, 8]
    assert all(held[i, i % 2] >= 2 for i in range(4))


def test_zero_is_iid() -> None:
    # Each client: 1000 of 30,000 without replacement, 100 per class, standard deviation
    # sqrt(1000 * 0.1 * 0.9 * 29/30) = 9.3 over 300 counts; 5 deviations are 47.
    labels = balanced(10, 3000)
    held = counts(labels, by_main_class(labels, 30, 0, rng()))
    assert np.abs(held - 100).max() < 47
    assert 8 < held.std() < 10.6  # an even distribution would not be an iid draw


def test_one_is_the_main_class_only() -> None:
    labels = balanced(10, 300)
    clients = by_main_class(labels, 30, 1, rng())
    for i, client in enumerate(clients):
        assert distinct(labels[client]) == [i % 10]
    assert len(distinct(np.concatenate(clients))) == 3000


def test_the_rest_comes_from_all_classes() -> None:
    # 30 clients of 2000: 1400 of the main class and 600 of all, so 60 of each and 1460 of the main.
    labels = balanced(10, 6000)
    held = counts(labels, by_main_class(labels, 30, 0.7, rng()))
    is_main = np.arange(10) == (np.arange(30) % 10)[:, None]
    assert np.abs(held[is_main] - 1460).max() < 5 * 7.3
    others = held[~is_main]
    assert np.abs(others - 60).max() < 5 * 7.3
    assert abs(others.mean() - 60) < 1


def test_two_clients_sharing_a_main_class_shrink_all_clients() -> None:
    labels = balanced(10, 100)
    clients = by_main_class(labels, 12, 1, rng())
    assert_disjoint(clients, len(labels))
    assert [len(client) for client in clients] == [50] * 12
    for i, client in enumerate(clients):
        assert distinct(labels[client]) == [i % 10]


def test_unequal_demand_leaves_the_rest_uniform() -> None:
    # 12 clients of size s, half main: class 0 must supply 2 * s/2 + 12 * s/2 / 10 = 1.6 s <= 1000.
    # s = 625 rounds to 313 main samples, and 626 + 374.4 > 1000, so s = 624.
    labels = balanced(10, 1000)
    clients = by_main_class(labels, 12, 0.5, rng())
    assert_disjoint(clients, len(labels))
    assert {len(client) for client in clients} == {624}
    rest = counts(labels, clients).sum(0) - 312 * np.array([2, 2] + [1] * 8)
    assert set(rest.tolist()) <= {374, 375}  # 12 * 312 / 10 = 374.4


@pytest.mark.parametrize("non_iid", [0, 0.5, 1])
@pytest.mark.parametrize("n_clients", [1, 3])
def test_fewer_clients_than_classes(n_clients: int, non_iid: float) -> None:
    labels = balanced(10, 100)
    clients = by_main_class(labels, n_clients, non_iid, rng())
    assert_disjoint(clients, len(labels))
    held = counts(labels, clients)
    if non_iid > 0:
        assert held.argmax(1).tolist() == list(range(n_clients))
    # Class 0 has 100 samples and supplies size * (non_iid + (1 - non_iid) * n_clients / 10).
    assert (
        len(clients[0])
        == {(1, 0): 1000, (1, 0.5): 181, (1, 1): 100, (3, 0): 333, (3, 0.5): 153, (3, 1): 100}[
            n_clients, non_iid
        ]
    )


def test_the_remainder_is_unused() -> None:
    clients = by_main_class(np.zeros(11, np.int64), 3, 0.5, rng())
    assert [len(client) for client in clients] == [3, 3, 3]


def test_main_classes_are_classes_present_in_the_labels() -> None:
    labels = np.array([3, 7] * 20)
    clients = by_main_class(labels, 4, 1, rng())
    assert [distinct(labels[client]) for client in clients] == [[3], [7], [3], [7]]


def test_samples_are_shuffled() -> None:
    labels = balanced(10, 1000)
    first = by_main_class(labels, 10, 0.5, rng())[0]
    rate = (labels[first[:500]] == 0).mean()  # 0.55 overall; 1 if the main class came first
    assert 0.45 < rate < 0.65


def test_a_main_class_smaller_than_its_clients() -> None:
    labels = np.array([0] + [1] * 99)
    with pytest.raises(UserError, match=r"n_clients=10, non_iid=1: 5 clients .* of 1 samples"):
        by_main_class(labels, 10, 1, rng())


@settings(deadline=None)
@given(cases, st.floats(1e-3, 1e4), seeds)
def test_dirichlet_uses_every_sample_once(
    case: tuple[list[int], int], alpha: float, seed: int
) -> None:
    values, n_clients = case
    labels = np.array(values)
    try:
        clients = by_dirichlet(labels, n_clients, alpha, rng(seed))
    except UserError:  # too few samples, or alpha too small for every client to get one
        return
    assert len(clients) == n_clients
    assert min(len(client) for client in clients) >= 1
    assert np.array_equal(np.sort(np.concatenate(clients)), np.arange(len(labels)))


def test_dirichlet_proportions_have_the_right_moments() -> None:
    # Dirichlet(alpha) over k clients: mean 1/k, variance (k - 1) / (k^2 (k alpha + 1)).
    k, alpha, n_classes, per_class = 5, 0.5, 400, 500
    labels = balanced(n_classes, per_class)
    rates = counts(labels, by_dirichlet(labels, k, alpha, rng())) / per_class  # [k, C]
    assert np.allclose(rates.sum(0), 1)
    assert np.abs(rates.mean(1) - 1 / k).max() < 5 * (0.0457 / n_classes) ** 0.5
    variance = (k - 1) / (k**2 * (k * alpha + 1))
    assert abs(rates.var() / variance - 1) < 0.1


def test_dirichlet_large_alpha_is_even_and_small_is_not() -> None:
    labels = balanced(10, 1000)
    even = counts(labels, by_dirichlet(labels, 10, 1e6, rng()))
    assert np.abs(even - 100).max() < 5
    skewed = counts(labels, by_dirichlet(labels, 10, 0.05, rng()))
    assert skewed.max(0).mean() > 500


@given(cases, seeds)
def test_iid_deals_every_sample_once(case: tuple[list[int], int], seed: int) -> None:
    values, n_clients = case
    labels = np.stack([values, values], axis=1)  # one label per symbol
    clients = at_random(labels, n_clients, rng(seed))
    assert len(clients) == n_clients
    assert distinct(np.concatenate(clients)) == [*range(len(values))]
    assert_disjoint(clients, len(values))
    sizes = [len(client) for client in clients]
    assert max(sizes) - min(sizes) <= 1


def test_iid_depends_on_the_generator_only() -> None:
    dealt = [at_random(np.zeros(30), 3, rng(seed))[0].tolist() for seed in (0, 0, 1)]
    assert dealt[0] == dealt[1] != dealt[2]
    with pytest.raises(UserError, match="n_clients=31: must be at most 30, the sample count"):
        at_random(np.zeros(30), 31, rng())


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.integers(0, 5), st.data())
def test_a_natural_client_holds_all_samples_of_one_owner(
    owners: list[int], seed: int, data: st.DataObject
) -> None:
    n_clients = data.draw(st.integers(1, len(set(owners))))
    clients = by_owner(np.array(owners), n_clients, rng(seed))
    held = [{owners[i] for i in client.tolist()} for client in clients]
    assert len(clients) == n_clients
    assert all(len(names) == 1 for names in held)
    assert len(set.union(*held)) == n_clients  # each client is another owner
    for client, (owner,) in zip(clients, held, strict=True):
        assert client.tolist() == [i for i, name in enumerate(owners) if name == owner]


def test_natural_clients_are_drawn_by_the_generator() -> None:
    owners = np.arange(1000) % 100
    drawn = {
        tuple(int(client[0]) for client in by_owner(owners, 3, rng(seed))) for seed in (0, 0, 1, 2)
    }
    assert len(drawn) == 3


def test_more_clients_than_owners_is_an_error() -> None:
    with pytest.raises(UserError, match=r"pool=3: the data has only 2 owners"):
        by_owner(np.array([7, 7, 9]), 3, rng())


def test_dirichlet_gives_up_with_an_error() -> None:
    with pytest.raises(UserError, match=f"alpha=0.0001, n_clients=50: each of {MAX_DRAWS} draws"):
        by_dirichlet(balanced(2, 100), 50, 1e-4, rng())


@pytest.mark.parametrize(("split", "setting"), [(by_main_class, 0.5), (by_dirichlet, 0.5)])
def test_same_seed_same_split(split: Any, setting: float) -> None:
    labels = balanced(10, 50)
    first, again = split(labels, 7, setting, rng(3)), split(labels, 7, setting, rng(3))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    other = split(labels, 7, setting, rng(4))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    assert np.array_equal(labels, balanced(10, 50))


@pytest.mark.parametrize(("split", "setting"), [(by_main_class, 0.5), (by_dirichlet, 1.0)])
@pytest.mark.parametrize(
    ("n_clients", "error"),
    [(0, "n_clients=0: must be at least 1"), (-3, "n_clients=-3"), (21, "at most 20")],
)
def test_impossible_n_clients(split: Any, setting: float, n_clients: int, error: str) -> None:
    with pytest.raises(UserError, match=error):
        split(balanced(2, 10), n_clients, setting, rng())


@pytest.mark.parametrize("non_iid", [-0.1, 1.1, float("nan"), float("inf")])
def test_impossible_non_iid(non_iid: float) -> None:
    with pytest.raises(UserError, match=f"non_iid={non_iid}: must be from 0 to 1"):
        by_main_class(balanced(2, 10), 2, non_iid, rng())


@pytest.mark.parametrize("alpha", [0, -1.0, float("nan"), float("inf")])
def test_impossible_alpha(alpha: float) -> None:
    with pytest.raises(UserError, match=f"alpha={alpha}: must be a positive number"):
        by_dirichlet(balanced(2, 10), 2, alpha, rng())


def dataset(reserved: tuple[int, ...] = ()) -> Images:
    y = torch.arange(600) % 10
    x = torch.zeros(600, 1, 2, 2, dtype=torch.uint8)
    return Images("made", x, y, x, y, 10, 0.5, 0.5, reserved=reserved)


def test_reserved_samples_go_to_no_client() -> None:
    held = torch.cat(client_indices(RunConfig(n_clients=5), dataset(reserved=(0, 17, 599))))
    assert held.dtype == torch.int64
    assert not {0, 17, 599} & set(held.tolist())


def test_an_entry_in_the_table_is_all_a_new_partition_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def contiguous(labels: Ints, n_clients: int, rng: np.random.Generator) -> list[Ints]:
        return np.array_split(np.arange(len(labels)), n_clients)

    monkeypatch.setitem(PARTITIONS, "contiguous", Partition(contiguous))
    config = RunConfig(n_clients=3, partition="contiguous")
    config.check()
    assert config.split == ("contiguous", None)
    assert [len(client) for client in client_indices(config, dataset())] == [200] * 3


def test_settings_are_checked_without_importing_torch() -> None:
    code = "import sys, fedbench.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
