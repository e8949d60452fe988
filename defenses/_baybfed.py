"""BayBFed's numerics and bookkeeping: sums, distributions, their divergence, the list of clusters.

Nothing here is a choice of the paper's: its equations and algorithms are in `baybfed.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedbench.ops import in_double, two_means

CHUNK = 1 << 18  # coordinates counted at a time, so that their bin numbers stay in the cache
FINER = 16  # fine bins in a bin
NO_DIVERGENCE = 1e-20  # below this it is rounding
LEAST_VARIANCE = 1e-24  # below this it is rounding


class Normal(NamedTuple):
    mean: float
    variance: float


def normal_of(values: Tensor) -> Normal:
    """The mean and the variance (ddof 0) of a vector."""
    _, sums, norms = products(values[None], values)
    mean = sums.item() / len(values)
    return Normal(mean, max(norms.item() ** 2 / len(values) - mean**2, LEAST_VARIANCE))


def products(updates: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """u.other, the sum and the norm of every u: [N] each, float64, in one pass."""
    along, sums, squared = torch.zeros(3, len(updates), dtype=torch.float64, device=other.device)
    for columns, rows in in_double(updates):
        along += rows @ other[columns].double()
        sums += rows.sum(dim=1)
        squared += torch.linalg.vector_norm(rows, dim=1) ** 2
    return along.cpu(), sums.cpu(), squared.sqrt().cpu()


class Points(NamedTuple):
    """Values that stand for the coordinates of a vector: float64."""

    x: Tensor  # [B]
    log_counts: Tensor  # [B] of the coordinates that each stands for


def every_point(values: Tensor) -> Points:
    return Points(values.double(), torch.zeros_like(values, dtype=torch.float64))


def binned(values: Tensor, n_bins: int, scale: float) -> Points:
    """The means of bins around 0, without the empty ones.

    Bins are of equal width in z = v / (|v| + scale): narrow where most coordinates are, and a few
    huge ones do not put all others into one bin. Counting in bins FINER times as many gives each
    bin's mean without a second pass for sums.
    """
    if scale == 0:  # all are zero
        return Points(*values.new_tensor([[0.0], [math.log(len(values))]], dtype=torch.float64))
    if not 1e-30 < scale < 1e30:
        values = values.double()  # for float32 could not hold |v| + scale
    half = n_bins * FINER // 2  # fine bins on either side of the one at 0
    at_zero = values.new_tensor(half + 0.5)
    counts = torch.zeros(2 * half + 1, dtype=torch.int64, device=values.device)
    for part in values.split(CHUNK):
        place = torch.addcdiv(at_zero, part, part.abs().add_(scale), value=half)
        counts += torch.bincount(place.int(), minlength=len(counts))
    # A bin has its fine ones on both sides, so that 0 is in the middle of one.
    fine = nn.functional.pad(counts, (FINER // 2, FINER - 1 - FINER // 2)).view(-1, FINER)
    counts = fine.sum(dim=1)
    used = counts > 0
    sums = scale * (fine[used] * _centres(half).to(values.device)[used]).sum(dim=1)
    return Points(sums / counts[used], counts[used].double().log())


@lru_cache(maxsize=2)
def _centres(half: int) -> Tensor:
    """v / scale at the middle of each fine bin, by bin: [n_bins + 1, FINER]."""
    z = torch.arange(-half, half + 1, dtype=torch.float64) / half
    z = z.clamp(1 / (4 * half) - 1, 1 - 1 / (4 * half))  # the outermost reach to infinity
    v = z / (1 - z.abs())
    return nn.functional.pad(v, (FINER // 2, FINER - 1 - FINER // 2)).view(-1, FINER)


def log_normal(x: Tensor, mean: float | Tensor, variance: float | Tensor) -> Tensor:
    """Logarithm of the normal density."""
    variance = torch.as_tensor(variance, dtype=torch.float64, device=x.device)
    return -0.5 * ((x - mean) ** 2 / variance + (2 * math.pi * variance).log())


def log_shares(log_density: Tensor, points: Points) -> Tensor:
    """Logarithm of each point's share, the density being normalised over the coordinates."""
    # The largest goes first: counts are nothing beside a density of e^-1e40.
    log_mass = log_density - log_density.amax(dim=-1, keepdim=True) + points.log_counts
    return log_mass - log_mass.logsumexp(dim=-1, keepdim=True)


def divergences(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Jensen-Shannon divergence, in nats, of [B] from each row of [K, B]: [K] in 0..ln 2.

    With r = log q - log p,

        JSD = ln 2 - 1/2 sum [p softplus(r) + q softplus(-r)]

    of which rounding leaves nothing when q is near p. Points with |r| < 1 therefore add what has no
    differences of nearly equal numbers, 1/2 p [r/2 expm1(r) - (1 + e^r) ln cosh(r/2)].
    """
    r = log_q - log_p
    near = r.abs().amax(dim=-1) < 1  # [K]
    total = torch.empty_like(r[:, 0])
    total[near] = _near_terms(log_p, r[near]).sum(dim=-1)
    total[~near] = _far_terms(log_p, r[~near]).sum(dim=-1)
    return torch.where(total < NO_DIVERGENCE, 0.0, total.clamp_max(math.log(2)))


def _near_terms(log_p: Tensor, r: Tensor) -> Tensor:
    """With h = expm1(r/2): expm1(r) = h (h + 2), and cosh(r/2) = 1 + h^2 / (2 + 2 h)."""
    h = (r / 2).expm1()
    grown = h * (h + 2)
    return log_p.exp() * (r / 2 * grown - (2 + grown) * (h * h / (2 + 2 * h)).log1p()) / 2


def _far_terms(log_p: Tensor, r: Tensor) -> Tensor:
    p, q = log_p.exp(), (log_p + r).exp()
    softplus = nn.functional.softplus(r, threshold=50)
    far = (p * (math.log(2) - softplus) + q * (math.log(2) - (softplus - r))) / 2
    return torch.where(r.abs() < 1, _near_terms(log_p, r.clamp(-1, 1)), far)


class Cluster(NamedTuple):
    mean: float
    variance: float
    n: int


@dataclass
class Clusters:
    """The clusters in the course of a round."""

    known: dict[int, Cluster]  # by number, oldest first
    n_opened: int  # ever, so that no number is used twice

    @classmethod
    def load(cls, state: dict[str, Any], persist: bool) -> Clusters:
        rows = state["clusters"].tolist() if persist else []
        known = {int(number): Cluster(mu, s2, int(n)) for mu, s2, n, number in rows}
        return cls(known, state["opened"])

    def saved(self) -> dict[str, Any]:
        rows = [[*cluster, number] for number, cluster in self.known.items()]
        clusters = torch.tensor(rows, dtype=torch.float64).reshape(-1, 4)
        return {"clusters": clusters, "opened": self.n_opened}

    def add(self, cluster: Cluster, most: int | None) -> int:
        """Opens a cluster, in the place of the oldest if there are as many as may be."""
        if len(self.known) == most:
            del self.known[min(self.known)]
        number, self.n_opened = self.n_opened, self.n_opened + 1
        self.known[number] = cluster
        return number


class Weights(NamedTuple):
    """What Eq. 2 and 3 make of each client: [N] float64."""

    shift: Tensor  # D
    mean: Tensor  # of W
    rms: Tensor  # of u
    error: Tensor  # e


class Client(NamedTuple):
    """What the clusters need to know of a client."""

    row: int  # of the updates
    shift: float  # D
    rms: float  # of u
    mean: float  # m, of W_up
    error: float  # e, a variance
    base_measure: float  # H


class Round(NamedTuple):
    """What is the same for all clients of a round."""

    updates: Tensor  # [N, P]
    global_params: Tensor  # [P]
    initial: Normal  # mu_p, v_p
    sigma0_sq: float


def clients_of(weights: Weights, base_measure: Tensor) -> list[Client]:
    columns = (weights.shift, weights.rms, weights.mean + weights.shift, weights.error)
    rows = zip(*(column.tolist() for column in (*columns, base_measure)), strict=True)
    return [Client(row, *values) for row, values in enumerate(rows)]


def without_upper_group(scores: Tensor, separation: float, spread: float) -> Tensor:
    """Who stays [n] if there may be one group of scores or two. Ours, not the paper's.

    Of the logarithms of the scores, since attackers' differ from the others' by a factor:

    - two groups, if the centres of exact 2-means are more than `spread` apart and explain at least
      `separation` of the variance (adjusted for n, as R^2 is for two parameters, since a few values
      always fall apart): the lower group stays;
    - one group, if their standard deviation is at most `spread`: everybody stays;
    - neither is clear: who is below the mean score stays, as in the paper.
    """
    logs = scores.clamp_min(math.sqrt(NO_DIVERGENCE)).log()
    (gap,), lower = two_means(logs[:, None])
    n, n_lower = len(logs), int(lower.sum())
    total = ((logs - logs.mean()) ** 2).sum()
    within = total - n_lower * (n - n_lower) / max(n, 1) * gap**2
    if n > 3 and gap > spread and within / (n - 3) <= (1 - separation) * total / (n - 1):
        return lower[:, 0]
    return scores < (math.inf if total <= n * spread**2 else scores.mean())
