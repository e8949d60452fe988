"""Numerics of BayBFed; the method itself is in `baybfed.py`.

Sums over coordinates in float64, histograms, log densities, a Jensen-Shannon divergence that stays
accurate near 0, a mean that one score cannot move far, and a test for two groups of scores; and the
records of a round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedbench.ops import in_double, median, two_means

CHUNK = 1 << 18  # coordinates to count at a time, so that their bin numbers stay in the cache
FINE_BINS = 16  # per bin
TAIL = 4.0  # coordinates beyond this many rms are not binned: there, bins are wide
LEAST_DIVERGENCE = 1e-20  # smaller divergences are rounding error
LEAST_VARIANCE = 1e-24  # smaller variances are rounding error


class Cluster(NamedTuple):
    """A normal over weights."""

    mean: float  # mu
    variance: float  # s2
    n: int  # clients that joined, over all rounds


class Client(NamedTuple):
    """A client in the current round."""

    row: int  # of the updates
    base_measure: float  # H
    norm: float  # d
    shift: float  # D
    mean: float  # m
    error: float  # e


class RoundContext(NamedTuple):
    """What all clients of a round share."""

    updates: Tensor  # [N, P]
    global_params: Tensor  # [P] G
    initial: tuple[float, float]  # mu_p, v_p
    sigma0_sq: float
    clusters: dict[int, Cluster]  # by number, oldest first; changes during the round
    new_numbers: Iterator[int]  # numbers of future clusters; none is used twice


def mean_and_variance(values: Tensor) -> tuple[float, float]:
    """Mean and variance (ddof 0) of a vector."""
    _, sums, norms = _products(values[None], values)
    mean = sums.item() / len(values)
    return mean, norms.item() ** 2 / len(values) - mean**2


def cosine_mean_norm(
    updates: Tensor, global_params: Tensor, of_models: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """cos(W, G) and mean(W) of W = u, or of W = G + u with `of_models`, and |u|: [N] each, float64.

    The cosine is 0 if a vector has length 0.
    """
    along, sums, norms = _products(updates, global_params)
    g_squared, g_sum, g_norm = (v.item() for v in _products(global_params[None], global_params))
    lengths = norms
    if of_models:
        lengths = (g_squared + 2 * along + norms**2).clamp_min(0).sqrt()
        along, sums = g_squared + along, g_sum + sums
    both = lengths * g_norm
    cosines = torch.where(both > 0, along / both, 0).clamp(-1, 1)
    return cosines, sums / updates.shape[1], norms


def _products(updates: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """u.other, sum and norm of every u, in one pass: [N] each, float64, on the CPU."""
    along, sums, squared = torch.zeros(3, len(updates), dtype=torch.float64, device=other.device)
    for columns, rows in in_double(updates):
        along += rows @ other[columns].double()
        sums += rows.sum(dim=1)
        squared += torch.linalg.vector_norm(rows, dim=1) ** 2
    return along.cpu(), sums.cpu(), squared.sqrt().cpu()


class Points(NamedTuple):
    """Values of a vector's coordinates, with the number of coordinates that each represents."""

    x: Tensor  # [B] float64
    log_counts: Tensor  # [B] float64


def all_points(values: Tensor) -> Points:
    """Every coordinate of a vector as a point."""
    return Points(values.double(), torch.zeros_like(values, dtype=torch.float64))


def histogram_points(values: Tensor, n_bins: int, scale: float) -> Points:
    """Means and counts of a histogram's nonempty bins, and the coordinates in its tails.

    Bins have equal width in z = v / (|v| + scale). They are narrow around 0, where most coordinates
    are, and a few huge coordinates do not push all others into one bin. Each bin is counted in
    FINE_BINS parts, which gives its mean without a second pass over the coordinates. Coordinates
    beyond TAIL times the scale are points of their own, at most `n_bins`: the largest ones.
    """
    if scale == 0:  # all coordinates are zero
        return Points(*values.new_tensor([[0.0], [math.log(len(values))]], dtype=torch.float64))
    if not 1e-30 < scale < 1e30:
        values = values.double()  # |v| + scale may not fit float32
    half = n_bins * FINE_BINS // 2  # fine bins on either side of the one at 0
    at_zero = values.new_tensor(half + 0.5)

    def count(part: Tensor, sizes: Tensor) -> Tensor:
        place = torch.addcdiv(at_zero, part, sizes + scale, value=half)
        return torch.bincount(place.int(), minlength=2 * half + 1)

    counts, tails = torch.zeros(2 * half + 1, dtype=torch.int64, device=values.device), []
    for part in values.split(CHUNK):
        sizes = part.abs()
        counts += count(part, sizes)
        tails.append(part[sizes > TAIL * scale])
    tail = torch.cat(tails)
    if len(tail) > n_bins:  # bounds the time to compare a client with a cluster
        tail = tail[tail.abs().topk(n_bins).indices]
    counts -= count(tail, tail.abs())
    # Padding on both sides puts 0 in the middle of a bin.
    fine = nn.functional.pad(counts, (FINE_BINS // 2, FINE_BINS - 1 - FINE_BINS // 2))
    fine = fine.view(-1, FINE_BINS)
    counts = fine.sum(dim=1)
    used = counts > 0
    sums = scale * (fine[used] * _fine_centers(half).to(values.device)[used]).sum(dim=1)
    means, single = sums / counts[used], torch.zeros_like(tail, dtype=torch.float64)
    log_counts = counts[used].double().log()
    return Points(torch.cat([means, tail.double()]), torch.cat([log_counts, single]))


@lru_cache(maxsize=2)
def _fine_centers(half: int) -> Tensor:
    """v / scale at the center of each fine bin, by bin: [n_bins + 1, FINE_BINS]."""
    z = torch.arange(-half, half + 1, dtype=torch.float64) / half
    z = z.clamp(1 / (4 * half) - 1, 1 - 1 / (4 * half))  # the outermost bins reach to infinity
    v = z / (1 - z.abs())
    return nn.functional.pad(v, (FINE_BINS // 2, FINE_BINS - 1 - FINE_BINS // 2)).view(
        -1, FINE_BINS
    )


def normal_density(x: Tensor, mean: float, variance: float) -> Tensor:
    """N(x; mean, variance)."""
    return _log_normal_density(x, mean, variance).exp()


def log_normal_probabilities(
    values: Tensor, mean: float | Tensor, variance: float | Tensor, log_counts: Tensor
) -> Tensor:
    """ln N(values; mean, variance), normalized to sum to 1 over all coordinates: [.., B].

    A value with a count represents that number of coordinates.
    """
    return _normalized(_log_normal_density(values, mean, variance), log_counts)


def log_base_probabilities(
    density: Tensor, base_measure: float, variance: float, log_counts: Tensor
) -> Tensor:
    """ln N(density + H; 1, variance), normalized as above: [B].

    It leaves out (H - 1)^2, which is the same for all values and would swallow the density in the
    rounding error of a large |H|.
    """
    excess = density * (density + 2 * (base_measure - 1))  # (density + H - 1)^2 - (H - 1)^2
    return _normalized(-excess / (2 * max(variance, LEAST_VARIANCE)), log_counts)


def _normalized(log_density: Tensor, log_counts: Tensor) -> Tensor:
    # Subtract the maximum first: counts would vanish next to a log density of -1e40.
    log_mass = log_density - log_density.amax(dim=-1, keepdim=True) + log_counts
    return log_mass - log_mass.logsumexp(dim=-1, keepdim=True)


def _log_normal_density(x: Tensor, mean: float | Tensor, variance: float | Tensor) -> Tensor:
    variance = torch.as_tensor(variance, dtype=torch.float64, device=x.device)
    variance = variance.clamp_min(LEAST_VARIANCE)
    return -0.5 * ((x - mean) ** 2 / variance + (2 * math.pi * variance).log())


def jensen_shannon_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Jensen-Shannon divergence, in nats, of p [B] from each row of q [K, B]: [K] in 0..ln 2.

    With r = log q - log p,

        JSD = ln 2 - 1/2 sum [p softplus(r) + q softplus(-r)],

    which cancels catastrophically when q is near p. Points with |r| < 1 therefore contribute
    1/2 p [r/2 expm1(r) - (1 + e^r) ln cosh(r/2)], which has no difference of nearly equal numbers.
    """
    r = log_q - log_p
    near = r.abs().amax(dim=-1) < 1  # [K]
    total = torch.empty_like(r[:, 0])
    total[near] = _near_terms(log_p, r[near]).sum(dim=-1)
    total[~near] = _far_terms(log_p, r[~near]).sum(dim=-1)
    return torch.where(total < LEAST_DIVERGENCE, 0.0, total.clamp_max(math.log(2)))


def _near_terms(log_p: Tensor, r: Tensor) -> Tensor:
    """With h = expm1(r/2): expm1(r) = h (h + 2), and cosh(r/2) = 1 + h^2 / (2 + 2 h)."""
    h = (r / 2).expm1()
    expm1_r = h * (h + 2)
    return log_p.exp() * (r / 2 * expm1_r - (2 + expm1_r) * (h * h / (2 + 2 * h)).log1p()) / 2


def _far_terms(log_p: Tensor, r: Tensor) -> Tensor:
    p, q = log_p.exp(), (log_p + r).exp()
    softplus = nn.functional.softplus(r, threshold=50)
    far = (p * (math.log(2) - softplus) + q * (math.log(2) - (softplus - r))) / 2
    return torch.where(r.abs() < 1, _near_terms(log_p, r.clamp(-1, 1)), far)


def comparable(norms: Tensor, norm_range: float | None) -> Tensor:
    """Mask [n] of the norms at most `norm_range` times above or below the median; None: all."""
    if norm_range is None:
        return torch.ones_like(norms, dtype=torch.bool)
    middle = norms.median()  # the lower of two: half of the clients cannot move it above the others
    return (norms <= norm_range * middle) & (norms >= middle / norm_range)


def capped_mean(scores: Tensor, cap: float | None) -> float:
    """Mean of scores, where each counts as at most `cap` times the median; None: no limit."""
    return float((scores if cap is None else scores.clamp_max(cap * median(scores))).mean())


def outside_upper_group(
    scores: Tensor, separation: float, spread: float, cap: float | None = None
) -> Tensor:
    """Mask [n] of the scores to keep, from one group of scores or two. Ours, not the paper's.

    Works on log scores, because attackers' scores differ from honest ones by a factor:

    - Two groups, if the centers of exact 2-means are more than `spread` apart and explain at least
      `separation` of the variance: keep the lower group. The variance is adjusted for n like R^2
      with two parameters, because a few values always split well.
    - One group, if the standard deviation is at most `spread`: keep all.
    - Otherwise keep the scores below the mean, as with `threshold=mean`.
    """
    logs = scores.clamp_min(math.sqrt(LEAST_DIVERGENCE)).log()
    (gap,), lower = two_means(logs[:, None])
    n, n_lower = len(logs), int(lower.sum())
    total = ((logs - logs.mean()) ** 2).sum()
    within = total - n_lower * (n - n_lower) / max(n, 1) * gap**2
    if n > 3 and gap > spread and within / (n - 3) <= (1 - separation) * total / (n - 1):
        return lower[:, 0]
    return scores < (math.inf if total <= n * spread**2 else capped_mean(scores, cap))
