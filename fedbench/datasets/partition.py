"""Partitions: which client holds which training samples.

To add one, write a function like `by_dirichlet` and list it in PARTITIONS; `partition=<name>` then
selects it. If it needs a new setting, add that to RunConfig and `conf/config.yaml`.

A partition depends only on the labels or owners, its setting and the generator's seed. Partitions
of one seed are not nested: another `n_clients`, `non_iid` or `alpha` redistributes all samples.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedbench.errors import UserError

if TYPE_CHECKING:  # config.py reads PARTITIONS before torch, which takes seconds, is imported
    from torch import Tensor

    from fedbench.config import RunConfig
    from fedbench.data import Dataset

Ints = NDArray[np.int64]

MAX_DRAWS = 1000  # Dirichlet draws before giving up


def by_main_class(
    labels: NDArray[Any], n_clients: int, non_iid: float, rng: np.random.Generator
) -> list[Ints]:
    """Give each client a fraction `non_iid` of its samples from its main class.

    With C classes present in `labels` [n], client i has main class i % C. Each client holds `size`
    samples: round(non_iid * size) from its main class, the rest from all classes (main class
    included) in the proportions n_c / n of the whole set. So 0 is iid, and 1 is the main class
    only. No sample is held twice. Each vector [size] is in random order.

    The rests of all clients come from one shuffled pool with these proportions, so a client's rest
    varies like an iid draw. Distributing whatever the main classes leave over would instead skew
    the rest away from classes in high demand.
    """
    if not 0 <= non_iid <= 1:
        raise UserError(f"non_iid={non_iid}: must be from 0 to 1")
    _check_n_clients(n_clients, len(labels))
    pools = _shuffled_by_class(labels, rng)
    class_sizes = np.array([len(pool) for pool in pools])  # [C]
    n_sharing = np.bincount(np.arange(n_clients) % len(pools), minlength=len(pools))  # [C]
    size = _client_size(class_sizes, n_sharing, non_iid)
    n_main = _n_main(size, non_iid)
    n_rest = _apportion(n_clients * (size - n_main), class_sizes)  # [C]
    ends = n_sharing * n_main  # [C]
    mains = [p[: k * n_main].reshape(k, n_main) for p, k in zip(pools, n_sharing, strict=True)]
    rest = [p[end : end + n] for p, end, n in zip(pools, ends, n_rest, strict=True)]
    rests = rng.permutation(np.concatenate(rest)).reshape(n_clients, size - n_main)
    return [
        rng.permutation(np.concatenate([mains[i % len(pools)][i // len(pools)], rests[i]]))
        for i in range(n_clients)
    ]


def by_dirichlet(
    labels: NDArray[Any], n_clients: int, alpha: float, rng: np.random.Generator
) -> list[Ints]:
    """Distribute each class of `labels` [n] over the clients in Dirichlet(alpha) proportions.

    A small `alpha` concentrates a class on few clients, with very different sizes; a large one is
    iid. Every sample goes to exactly one client. Every client gets at least one: if a draw leaves a
    client empty, all proportions are drawn again. Each vector is in random order.
    """
    if not (alpha > 0 and math.isfinite(alpha)):
        raise UserError(f"alpha={alpha}: must be a positive number")
    _check_n_clients(n_clients, len(labels))
    pools = _shuffled_by_class(labels, rng)
    class_sizes = np.array([[len(pool)] for pool in pools])  # [C, 1]
    for _ in range(MAX_DRAWS):
        proportions = rng.dirichlet(np.full(n_clients, alpha), size=len(pools))  # [C, n_clients]
        # Without the last cut, np.split puts all remaining samples there: rounding loses none.
        cuts = np.rint(proportions.cumsum(axis=1)[:, :-1] * class_sizes).astype(np.int64)
        sizes = np.diff(cuts, axis=1, prepend=0, append=class_sizes).sum(axis=0)  # [n_clients]
        if sizes.min() > 0:
            break
    else:
        raise UserError(
            f"alpha={alpha}, n_clients={n_clients}: each of {MAX_DRAWS} draws left a client "
            f"without any of the {len(labels)} samples; use a larger alpha or fewer clients"
        )
    parts = [np.split(pool, cut) for pool, cut in zip(pools, cuts, strict=True)]
    return [rng.permutation(np.concatenate(client)) for client in zip(*parts, strict=True)]


def by_owner(owners: NDArray[Any], n_clients: int, rng: np.random.Generator) -> list[Ints]:
    """Draw `n_clients` of the `owners` [n]; each client holds one owner's samples, in order."""
    names = np.unique(owners)
    if n_clients > len(names):
        raise UserError(
            f"pool={n_clients}: the data has only {len(names)} owners, one per client; use a "
            "smaller pool, or fewer n_clients"
        )
    drawn = rng.permutation(names)[:n_clients]
    order = np.argsort(owners, kind="stable")
    starts = np.searchsorted(owners, drawn, sorter=order)
    ends = np.searchsorted(owners, drawn, side="right", sorter=order)
    return [order[start:end] for start, end in zip(starts, ends, strict=True)]


def at_random(labels: NDArray[Any], n_clients: int, rng: np.random.Generator) -> list[Ints]:
    """Deal all samples of `labels` [n, ...] at random; sizes of clients differ by at most one."""
    _check_n_clients(n_clients, len(labels))
    return np.array_split(rng.permutation(len(labels)), n_clients)


@dataclass(frozen=True)
class Partition:
    """A function that splits samples, and its inputs."""

    split: Callable[..., list[Ints]]  # (values [n], n_clients, setting if any, rng) -> indices
    setting: str | None = None  # RunConfig key
    values: str = "y_train"  # Dataset tensor to split by
    by_label: bool = True  # whether every sample must have one label


PARTITIONS = {
    "main_class": Partition(by_main_class, "non_iid"),
    "dirichlet": Partition(by_dirichlet, "dirichlet_alpha"),
    "iid": Partition(at_random, by_label=False),
    "natural": Partition(by_owner, values="owners", by_label=False),
}


def client_indices(config: RunConfig, dataset: Dataset) -> list[Tensor]:
    """Return the training-sample indices [n_i] int64 of every client in the pool."""
    import torch

    from fedbench.rng import numpy_generator

    partition = PARTITIONS[config.partition]
    available = np.delete(np.arange(len(dataset.y_train)), [*dataset.reserved])
    values = getattr(dataset, partition.values).cpu().numpy()[available]
    settings = [] if partition.setting is None else [getattr(config, partition.setting)]
    rng = numpy_generator(config.seed, "partition")
    parts = partition.split(values, config.pool_size, *settings, rng)
    return [torch.from_numpy(available[part]) for part in parts]


def _check_n_clients(n_clients: int, n_samples: int) -> None:
    if n_clients < 1:
        raise UserError(f"n_clients={n_clients}: must be at least 1")
    if n_clients > n_samples:
        raise UserError(f"n_clients={n_clients}: must be at most {n_samples}, the sample count")


def _shuffled_by_class(labels: NDArray[Any], rng: np.random.Generator) -> list[Ints]:
    """Return the indices of each class present, shuffled; classes in ascending order."""
    return [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]


def _n_main(size: int, non_iid: float) -> int:
    return int(non_iid * size + 0.5)


def _client_size(class_sizes: Ints, n_sharing: Ints, non_iid: float) -> int:
    """Return the largest number of samples that every client of `by_main_class` can have.

    That is n // n_clients, unless a class is too small: class c, the main class of k_c clients,
    must hold k_c * n_main + n_clients * n_rest * n_c / n <= n_c samples. The size is the same for
    all clients, so that neither size nor `non_iid` differs between them; surplus samples are
    unused. Balanced data needs a smaller size only if n_clients is not a multiple of C: with 12
    clients, 10 classes and non_iid = 1, two clients share class 0, so each client gets n / 20.
    """
    n, n_clients = int(class_sizes.sum()), int(n_sharing.sum())

    def too_large(size: int) -> bool:
        n_main = _n_main(size, non_iid)
        n_rest = n_clients * (size - n_main)
        return bool((n_sharing * n_main * n + n_rest * class_sizes > class_sizes * n).any())

    size = bisect.bisect_left(range(1, n // n_clients + 1), True, key=too_large)
    if size == 0:
        worst = int((n_sharing - class_sizes).argmax())
        raise UserError(
            f"n_clients={n_clients}, non_iid={non_iid}: {n_sharing[worst]} clients share a main "
            f"class of {class_sizes[worst]} samples; use fewer clients"
        )
    return size


def _apportion(total: int, weights: Ints) -> Ints:
    """Return integers [C] proportional to `weights` [C] that sum to `total`.

    By largest remainder: each value is its exact share rounded down or up, so it fits wherever the
    exact share does.
    """
    counts, remainders = np.divmod(total * weights, weights.sum())
    counts[np.argsort(-remainders, kind="stable")[: total - counts.sum()]] += 1
    return counts
