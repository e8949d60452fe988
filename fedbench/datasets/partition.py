"""Which client holds which samples: index vectors into the training set.

A split depends on the labels, the settings and the generator's seed, and on nothing else. Splits of
one seed are not nested: another `n_clients`, `non_iid` or `alpha` deals all samples anew.
"""

from __future__ import annotations

import bisect
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbench.config import RunConfig
from fedbench.data import Dataset
from fedbench.errors import UserError
from fedbench.rng import numpy_generator

Ints = NDArray[np.int64]

MAX_DRAWS = 1000  # of Dirichlet shares, before a setting counts as hopeless


def shards_of(config: RunConfig, dataset: Dataset) -> list[Tensor]:
    """Client -> indices of its samples, for all clients of the pool."""
    rng = numpy_generator(config.seed, "partition")
    held = torch.ones(len(dataset.y_train), dtype=torch.bool)
    held[[*dataset.reserved]] = False
    indices = held.nonzero()[:, 0]
    if config.partition == "natural":
        assert dataset.owners is not None  # `Plan.check_fit` asked for them
        shards = by_owner(dataset.owners[indices], config.pool_size, rng)
        return [indices[shard] for shard in shards]
    labels = dataset.y_train.cpu()[indices]
    if config.partition == "dirichlet":
        shards = by_dirichlet(labels, config.pool_size, config.dirichlet_alpha, rng)
    else:
        shards = by_main_class(labels, config.pool_size, config.non_iid, rng)
    return [indices[shard] for shard in shards]


def by_main_class(
    labels: Tensor, n_clients: int, non_iid: float, rng: np.random.Generator
) -> list[Tensor]:
    """Split `labels` [n] so that a share `non_iid` of a client's samples is of its main class.

    Of the C classes that occur, client i's main class is number i % C. Every client holds
    `size` samples, no two clients the same one: round(non_iid * size) from its main class, the rest
    from all classes (its main class among them) in the proportions p_c = n_c / n of the whole set.
    So 0 is iid and 1 is the main class only. Each vector [size] int64 is in random order.

    The rest of all clients is one pool, with the share p_c of each class to the nearest sample,
    shuffled and dealt out: a client's rest varies as an iid draw does. Dealing out whatever the
    main classes leave over instead would turn the rest away from classes in high demand.

    `size` is n // n_clients, and the remainder of the division is left out, unless a class is too
    small: k_c clients with main class c need k_c * n_main + n_clients * n_rest * p_c <= n_c. Then
    `size` is the largest for which every class suffices, and more samples are left out. It is the
    same for all clients, so that neither size nor `non_iid` differs between them. On balanced data
    this happens only if n_clients is no multiple of C: 12 clients, 10 classes and non_iid = 1 make
    two clients share class 0, hence 12 clients of n / 20 samples.
    """
    if not 0 <= non_iid <= 1:
        raise UserError(f"non_iid={non_iid}: must be from 0 to 1")
    _check_n_clients(n_clients, len(labels))
    pools = _shuffled_by_class(labels, rng)
    supply = np.array([len(pool) for pool in pools])  # [C]
    main_of = np.arange(n_clients) % len(pools)  # [n_clients]
    n_mains = np.bincount(main_of, minlength=len(pools))  # [C]

    def suffices(size: int) -> bool:
        n_main = _n_main(size, non_iid)
        n_rest = n_clients * (size - n_main)
        n = len(labels)
        return bool((n_mains * n_main * n + n_rest * supply <= supply * n).all())

    sizes = range(1, len(labels) // n_clients + 1)
    size = bisect.bisect_left(sizes, True, key=lambda size: not suffices(size))
    if size == 0:
        worst = int((n_mains - supply).argmax())
        raise UserError(
            f"n_clients={n_clients}, non_iid={non_iid}: {n_mains[worst]} clients share a main "
            f"class of {supply[worst]} samples; take fewer clients"
        )
    n_main = _n_main(size, non_iid)
    used = n_mains * n_main  # [C]
    n_rest = _apportion(n_clients * (size - n_main), supply)  # [C]
    mains = [p[: k * n_main].reshape(k, n_main) for p, k in zip(pools, n_mains, strict=True)]
    rest = np.concatenate([p[k : k + r] for p, k, r in zip(pools, used, n_rest, strict=True)])
    rests = rng.permutation(rest).reshape(n_clients, size - n_main)
    return [
        torch.from_numpy(rng.permutation(np.concatenate([mains[c][i // len(pools)], rests[i]])))
        for i, c in enumerate(main_of)
    ]


def by_dirichlet(
    labels: Tensor, n_clients: int, alpha: float, rng: np.random.Generator
) -> list[Tensor]:
    """Split `labels` [n] by class: of each, the clients' shares are drawn from Dirichlet(alpha).

    Small `alpha`: a class sits with few clients, and sizes differ widely; large `alpha`: iid. Every
    sample is with exactly one client and every client has at least one: shares that leave a client
    empty are drawn again, all of them. Each vector is in random order.
    """
    if not (alpha > 0 and math.isfinite(alpha)):
        raise UserError(f"alpha={alpha}: must be a positive number")
    _check_n_clients(n_clients, len(labels))
    pools = _shuffled_by_class(labels, rng)
    supply = np.array([[len(pool)] for pool in pools])  # [C, 1]
    for _ in range(MAX_DRAWS):
        shares = rng.dirichlet(np.full(n_clients, alpha), size=len(pools))  # [C, n_clients]
        # The last cut is left out: np.split ends there, and rounding cannot lose a sample.
        cuts = np.rint(shares.cumsum(axis=1)[:, :-1] * supply).astype(np.int64)
        sizes = np.diff(cuts, axis=1, prepend=0, append=supply).sum(axis=0)  # [n_clients]
        if sizes.min() > 0:
            break
    else:
        raise UserError(
            f"alpha={alpha}, n_clients={n_clients}: {MAX_DRAWS} draws each left a client without "
            f"any of the {len(labels)} samples; take a larger alpha or fewer clients"
        )
    parts = [np.split(pool, cut) for pool, cut in zip(pools, cuts, strict=True)]
    return [
        torch.from_numpy(rng.permutation(np.concatenate(client)))
        for client in zip(*parts, strict=True)
    ]


def by_owner(owners: Tensor, n_clients: int, rng: np.random.Generator) -> list[Tensor]:
    """The samples of `n_clients` of the owners [n], drawn at random, in the order they stand in."""
    values = owners.cpu().numpy()
    names = np.unique(values)
    if n_clients > len(names):
        raise UserError(
            f"pool={n_clients}: the samples are of {len(names)} owners, and a client is one; "
            "take a smaller pool, or fewer n_clients"
        )
    drawn = rng.permutation(names)[:n_clients]
    by_name = np.argsort(values, kind="stable")
    starts = np.searchsorted(values[by_name], names)
    shards = dict(zip(names, np.split(by_name, starts[1:]), strict=True))
    return [torch.from_numpy(shards[name]) for name in drawn]


def _check_n_clients(n_clients: int, n_samples: int) -> None:
    if n_clients < 1:
        raise UserError(f"n_clients={n_clients}: must be at least 1")
    if n_clients > n_samples:
        raise UserError(f"n_clients={n_clients}: must be at most {n_samples}, one sample a client")


def _shuffled_by_class(labels: Tensor, rng: np.random.Generator) -> list[Ints]:
    """The indices of each class that occurs, in random order; classes in ascending order."""
    values = labels.cpu().numpy()
    return [rng.permutation(np.flatnonzero(values == c)) for c in np.unique(values)]


def _n_main(size: int, non_iid: float) -> int:
    return int(non_iid * size + 0.5)


def _apportion(total: int, weights: Ints) -> Ints:
    """Whole numbers [C] in the proportions of `weights` [C] that add up to `total`.

    Largest remainders: each is its exact value rounded down or up, so it fits wherever the exact
    value does.
    """
    counts, remainders = np.divmod(total * weights, weights.sum())
    counts[np.argsort(-remainders, kind="stable")[: total - counts.sum()]] += 1
    return counts
