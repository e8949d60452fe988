"""The parts of BayBFed: distributions over coordinates, how far they diverge, and clusters."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fedbench.ops import middle

if TYPE_CHECKING:
    from fedbench.defenses.baybfed import BayBFed

CHUNK = 1 << 18  # coordinates counted at a time, so that their bin numbers stay in the cache
FINER = 16  # fine bins in a bin
NO_DIVERGENCE = 1e-20  # below this it is rounding
TOGETHER = 16  # clusters at a time, so that their densities stay in the cache
SAME = 1e-9  # relative difference of equal divergences


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


def shares(log_density: Tensor, points: Points) -> Tensor:
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


class Client(NamedTuple):
    """What the clusters need to know of a client."""

    x: Points
    log_p: Tensor  # [B] shares
    mean: float  # of x
    error: float  # a variance


class Normal(NamedTuple):
    mean: float
    variance: float


class Cluster(NamedTuple):
    mean: float
    variance: float
    n: int


class Clusters:
    """The clusters in the course of a round, by the number that each keeps, oldest first."""

    def __init__(self, rule: BayBFed, state: dict[str, Any], errors: Tensor) -> None:
        self.rule = rule
        self.opened: int = state["opened"]
        auto = isinstance(rule.sigma0_sq, str)
        self.s0 = 9 * float(middle(errors)) if auto else float(rule.sigma0_sq)
        rows = state["clusters"].tolist() if rule.persist else []
        self.known = {int(number): Cluster(mu, s2, int(n)) for mu, s2, n, number in rows}

    def to_tensor(self) -> Tensor:
        """[K, 4]: mean, variance, n, number."""
        rows = [[*cluster, number] for number, cluster in self.known.items()]
        return torch.tensor(rows, dtype=torch.float64).reshape(-1, 4)

    def meet(self, client: Client) -> tuple[float, int | None]:
        """The client's MaxJD, and the cluster to join: its number, or None for a new one."""
        numbers = [*self.known, None]
        normals = [*self.known.values(), self._new(client.error)]
        parameters = torch.tensor(normals, dtype=torch.float64, device=client.log_p.device)
        parts = []
        for part in parameters.split(TOGETHER):
            mu, s2, _ = part.T.unsqueeze(2)  # each [k, 1]
            log_q = shares(log_normal(client.x.x, mu, s2), client.x)  # [k, B]
            parts.append(divergences(client.log_p, log_q))
        found = torch.cat(parts)  # [K + 1]
        wanted = found.max() if self.rule.assign == "max" else found.min()
        first = (found - wanted).abs() <= SAME * wanted  # of equal ones the oldest
        score = found.max().sqrt() if self.rule.score == "distance" else found.max()
        return float(score), numbers[int(first.int().argmax())]

    def join(self, number: int | None, mean: float, error: float) -> int:
        """Eq. 6 and 7: takes a client in, in a new cluster if there is none of that number."""
        if number is None or number not in self.known:
            if len(self.known) == self.rule.max_clusters:
                del self.known[min(self.known)]
            number, self.opened = self.opened, self.opened + 1
            self.known[number] = self._new(error)
        cluster = self.known[number]
        n = cluster.n + 1
        tau, tau0 = 1 / (error if self.rule.tau == "client" else cluster.variance), 1 / self.s0
        total = n * tau + tau0
        centre = (mean * n * tau + self.rule.mu0 * tau0) / total
        self.known[number] = Cluster(centre, 1 / total + error, n)
        return number

    def _new(self, error: float) -> Cluster:
        return Cluster(self.rule.mu0, self.s0 + error, 0)
