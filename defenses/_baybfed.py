"""BayBFed's numerics: distributions over the coordinates of a vector, and how far they diverge."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

CHUNK = 1 << 18  # coordinates counted at a time, so that their bin numbers stay in the cache
FINER = 16
SMALL = 1e-3  # divergences below this need care
NO_DIVERGENCE = 1e-20  # and below this are rounding


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
    if scale == 0:
        return Points(values[:1].double(), values[:1].double() + math.log(len(values)))
    half = n_bins * FINER // 2  # fine bins on either side of the one at 0
    counts = torch.zeros(2 * half + 1, dtype=torch.int64, device=values.device)
    for part in values.split(CHUNK):
        z = part.abs().add_(scale)
        torch.div(part, z, out=z)
        counts += torch.bincount(z.mul_(half).add_(half + 0.5).int(), minlength=len(counts))
    used = counts.nonzero()[:, 0]
    z = ((used - half) / half).double().clamp(1 / (4 * half) - 1, 1 - 1 / (4 * half))
    v = scale * z / (1 - z.abs())
    groups, coarse = (
        (used + FINER // 2).div(FINER, rounding_mode="floor").unique(return_inverse=True)
    )
    mass = torch.zeros(len(groups), dtype=torch.float64, device=values.device)
    sums = mass.index_add(0, coarse, v * counts[used])
    mass = mass.index_add(0, coarse, counts[used].double())
    return Points(sums / mass, mass.log())


def log_normal(x: Tensor, mean: float | Tensor, variance: Tensor) -> Tensor:
    """Logarithm of the normal density."""
    return -0.5 * ((x - mean) ** 2 / variance + (2 * math.pi * variance).log())


def shares(log_density: Tensor, points: Points) -> Tensor:
    """Logarithm of each point's share, the density being normalised over the coordinates."""
    # The largest goes first: counts are nothing beside a density of e^-1e40.
    log_mass = log_density - log_density.amax(dim=-1, keepdim=True) + points.log_counts
    return log_mass - log_mass.logsumexp(dim=-1, keepdim=True)


def divergences(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Jensen-Shannon divergence, in nats, of [B] from each row of [K, B]: [K] in 0..ln 2.

    With r = log q - log p,

        JSD = ln 2 - 1/2 sum [p softplus(r) + q softplus(-r)]

    of which rounding leaves nothing when q is near p. Where it is small it is therefore summed from
    terms that are: for |r| < 1 without differences of nearly equal numbers,

        JSD = 1/2 sum p [r/2 expm1(r) - (1 + e^r) ln cosh(r/2)]
    """
    r = log_q - log_p
    softplus = nn.functional.softplus(r, threshold=50)
    total = math.log(2) - (log_p.exp() * softplus + log_q.exp() * (softplus - r)).sum(dim=-1) / 2
    small = total < SMALL
    if small.any():
        total[small] = _small_divergences(log_p, log_q[small])
    return torch.where(total < NO_DIVERGENCE, 0.0, total.clamp_max(math.log(2)))


def _small_divergences(log_p: Tensor, log_q: Tensor) -> Tensor:
    p, q, r = log_p.exp(), log_q.exp(), log_q - log_p
    softplus = nn.functional.softplus(r, threshold=50)
    far = p * (math.log(2) - softplus) + q * (math.log(2) - (softplus - r))
    s = r.clamp(-1, 1)
    grown = s.expm1()
    near = p * (s / 2 * grown - (2 + grown) * (2 * (s / 4).sinh() ** 2).log1p())
    return torch.where(r.abs() < 1, near, far).sum(dim=-1) / 2
