"""BayBFed: Kumari et al., BayBFed: Bayesian Backdoor Defense for Federated Learning, S&P 2023.

https://arxiv.org/abs/2301.09508

Each client has a Beta posterior (c, H); clusters (mu, s2, n) are kept across rounds. For client i
with W_i of l values, the global model G before the round, the mean and variance mu_p, v_p of the
global model before round 0, and D = 1 - cos(W_i, G), d = |u_i|:

    H     <- c / (c + l) H + mean(W_i) / c,  c <- c + l; at first H = mu_p                  (Eq. 1)
    x      = W_i + D, at every coordinate; m = mean(x)                                      (Eq. 2)
    e      = (d D)^2, at least error_floor times its median over the clients                (Eq. 3)
    p      = N(g; 1, m^2) with g = N(x; mu_p, v_p) + H                                      (Eq. 4)
    q_k    = N(x; mu_k, s2_k), for every cluster k and a new one, N(x; mu0, sigma0^2 + e)   (Eq. 5)
    score  = MaxJD_i = max_k JD(p, q_k), p and q normalised over the coordinates
    the cluster of that maximum takes the client in: n += 1, tau = 1/e, tau0 = 1/sigma0^2,
    mu     = (m n tau + mu0 tau0) / (n tau + tau0)                                          (Eq. 6)
    s2     = 1 / (n tau + tau0) + e                                                         (Eq. 7)
    kept   = score below the mean score, and not equal to another's; the update is their mean

The paper leaves much of this open and no implementation of its authors is public, so this is a
reading of it. `defense=baybfed_literal` is as close to the text as the options go. What the default
decides; docs/baybfed.md has the other choices and what is known of them:

1. W is the update u (`weights`), and d its length. With the local model p sits on few coordinates.
2. JD is the square root of the Jensen-Shannon divergence (`score`), as scipy's `jensenshannon`.
3. All clients of a round meet the clusters as they stood at its start, and are taken in by order of
   id (`scoring`), so that the order of clients cannot matter, as the paper claims. Algorithm 1
   changes clusters inside its loop, where it does.
4. Measurement errors have a floor (`error_floor`): without it one near 0 makes q a spike.
5. mu0 = 0 and sigma0^2 = 9 are not given in the paper.
6. Normals have variances. Eq. 3 gives a standard deviation; Algorithm 1 calls the same a variance.
7. In Eq. 6 and 7 n counts the client that is taken in; the text's n are those already there.
8. The filter is the text's (`filter`). In Algorithm 2 as printed the first test never holds, since
   a score is always in the list of all; read as "unlike all others" it keeps nearly everyone.
9. The base measure, a normal in the paper, is a number: its mean. c starts at a draw from
   Poisson(5), at least 1, since Eq. 1 divides by it.
10. "Initial" is the global model before round 0, after the benign rounds that come before it.
11. There are at most 256 clusters (`max_clusters`), so that rounds do not become ever slower.

It does not reproduce the paper's TPR and TNR of 100 %. The signal is in cos(u, G) and in the norm;
H has no measurable effect on the verdicts. It fails when clients hold one class each, rejects a
third to a half of the clients when nobody attacks (a mean threshold always rejects someone), and
keeps an attacker that is as long and as far from G as the others, or nearer to it.

Cost: a density is a function of one number, so only the distribution of the coordinates matters.
More coordinates than `bins` are counted in bins, each represented by its mean: O(l) and O(bins) a
cluster instead of O(l) a cluster. With weights=model or cosine=similarity p sits on few
coordinates: there all are used, at O(l) a cluster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbench.defense import DEFENSES, Aggregate, Defense, ServerView, mean_of
from fedbench.defenses._baybfed import (
    Client,
    Clusters,
    Normal,
    binned,
    every_point,
    log_normal,
    shares,
)
from fedbench.ops import in_double, middle
from fedbench.rng import derive

CHOICES = {
    "weights": ("update", "model"),
    "cosine": ("distance", "angular", "similarity"),
    "scoring": ("round", "sequential"),
    "tau": ("client", "cluster"),
    "assign": ("max", "min"),
    "score": ("distance", "divergence"),
    "filter": ("text", "pseudocode"),
}
LEAST_ERROR, LEAST_VARIANCE = 1e-12, 1e-24  # below these it is rounding
SAME_SCORE = 1e-9  # relative


@DEFENSES.register("baybfed")
@dataclass(frozen=True)
class BayBFed(Defense):
    """Rejects clients whose distribution of weights diverges most from the clusters seen."""

    weights: str = "update"  # W: update or model
    cosine: str = "distance"  # D: distance 1 - cos, angular arccos(cos) / pi, or similarity cos
    scoring: str = "round"  # clusters change after the round, or sequential: after each client
    tau: str = "client"  # precision in Eq. 6 and 7: of the client's error, or of the cluster
    assign: str = "max"  # a client joins the cluster of max or min divergence
    persist: bool = True  # clusters live across rounds
    score: str = "distance"  # JD: distance is the root of divergence
    mu0: float = 0.0  # a new cluster's mean
    sigma0_sq: float | int | str = 9.0  # and variance; auto: 9 times the round's median error
    error_floor: float = 0.5  # least error, as a share of the round's median error
    max_clusters: int | None = 256  # the oldest makes room; None: no limit
    filter: str = "text"  # below the mean and unlike others; pseudocode: either
    c: float = 5.0  # concentration: clients start at a draw from Poisson(c)
    bins: int = 2048  # points that stand for the coordinates if these are more

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                choices = f"{', '.join(known[:-1])} or {known[-1]}"
                raise ValueError(f"{name} must be {choices}, got {getattr(self, name)}")
        if not -1e6 <= self.mu0 <= 1e6:
            raise ValueError(f"mu0 must be between -1e6 and 1e6, got {self.mu0}")
        s0 = self.sigma0_sq
        if s0 != "auto" and (isinstance(s0, str) or not 0 < s0 <= 1e6):
            raise ValueError(f"sigma0_sq must be auto or above 0 and at most 1e6, got {s0}")
        if not 0 <= self.error_floor <= 1e6:
            raise ValueError(f"error_floor must be between 0 and 1e6, got {self.error_floor}")
        if self.max_clusters is not None and self.max_clusters < 1:
            raise ValueError(f"max_clusters must be at least 1, got {self.max_clusters}")
        if not 0 < self.c <= 1e6:
            raise ValueError(f"c must be above 0 and at most 1e6, got {self.c}")
        if self.bins < 2:
            raise ValueError(f"bins must be at least 2, got {self.bins}")

    def init(self) -> dict[str, Any]:
        empty = torch.zeros(0, 4, dtype=torch.float64)
        return {"clusters": empty, "opened": 0, "posterior": {}}

    def aggregate(
        self, updates: Tensor, state: dict[str, Any], view: ServerView
    ) -> tuple[Aggregate, dict[str, Any]]:
        ids = view.client_ids.tolist()
        rows = self._measure(updates, view.global_params)
        initial = _normal_of(view.initial_params)
        priors = {i: state["posterior"].get(i) or self._prior(i, initial, view) for i in ids}
        posterior = {
            i: _posterior(*priors[i], mean, updates.shape[1])
            for i, mean in zip(ids, rows.mean.tolist(), strict=True)
        }
        base_measure = torch.tensor([posterior[i][1] for i in ids], dtype=torch.float64)
        in_order = view.client_ids.argsort().tolist()
        clients = self._clients(in_order, updates, rows, base_measure, initial, view)
        clusters = Clusters(self, state, rows.error)
        scores = torch.zeros(len(ids), dtype=torch.float64, device=updates.device)
        joined = torch.zeros(len(ids), dtype=torch.int64)
        for row, (score, number) in zip(in_order, self._seat(clients, clusters), strict=True):
            scores[row], joined[row] = score, number
        outcome = mean_of(updates, self._keeps(scores), scores)
        details = {"cluster": joined, "base_measure": base_measure}
        return replace(outcome, details=details), {
            "clusters": clusters.to_tensor(),
            "opened": clusters.opened,
            "posterior": state["posterior"] | posterior,
        }

    def _measure(self, updates: Tensor, global_params: Tensor) -> Measures:
        along, sums, norms = _products(updates, global_params)
        g_squared, g_sum, g_norm = (v.item() for v in _products(global_params[None], global_params))
        lengths = norms
        if self.weights == "model":
            lengths = (g_squared + 2 * along + norms**2).clamp_min(0).sqrt()
            along, sums = g_squared + along, g_sum + sums
        both = lengths * g_norm
        cosines = torch.where(both > 0, along / both, 0).clamp(-1, 1)
        if self.cosine == "similarity":
            shift = cosines
        else:
            shift = 1 - cosines if self.cosine == "distance" else cosines.arccos() / math.pi
        error = (norms * shift) ** 2
        floor = (self.error_floor * middle(error)).clamp_min(LEAST_ERROR)
        mean = sums / updates.shape[1]
        return Measures(shift, mean, norms / math.sqrt(updates.shape[1]), error.maximum(floor))

    def _prior(self, client_id: int, initial: Normal, view: ServerView) -> tuple[float, float]:
        """(c, H) of a new client; the draw depends on nobody else who takes part."""
        rng = torch.Generator().manual_seed(derive(view.rng.initial_seed(), "c", client_id))
        drawn = torch.poisson(torch.tensor(self.c, dtype=torch.float64), generator=rng)
        return max(1.0, float(drawn)), initial.mean

    def _clients(
        self,
        in_order: list[int],
        updates: Tensor,
        rows: Measures,
        base_measure: Tensor,
        initial: Normal,
        view: ServerView,
    ) -> Iterator[Client]:
        spiky = self.weights == "model" or self.cosine == "similarity"
        origin = view.global_params.double() if self.weights == "model" else 0
        for row in in_order:
            shift, mean, rms, error = (values[row].item() for values in rows)
            if spiky or updates.shape[1] <= self.bins:
                points = every_point(origin + updates[row])
            else:
                points = binned(updates[row], self.bins, rms)
            points = points._replace(x=points.x + shift)
            m = mean + shift
            g = log_normal(points.x, *initial).exp() + base_measure[row].item()
            log_p = log_normal(g, 1.0, max(m * m, LEAST_VARIANCE))
            yield Client(points, shares(log_p, points), m, error)

    def _seat(self, clients: Iterable[Client], clusters: Clusters) -> list[tuple[float, int]]:
        """Each client's MaxJD and the number of the cluster that it joins."""
        if self.scoring == "round":
            met = [(*clusters.meet(client), client.mean, client.error) for client in clients]
            return [(score, clusters.join(number, *seen)) for score, number, *seen in met]
        seated = []
        for client in clients:
            if not clusters.known:
                number = clusters.join(None, client.mean, client.error)
                score, _ = clusters.meet(client)
            else:
                score, choice = clusters.meet(client)
                number = clusters.join(choice, client.mean, client.error)
            seated.append((score, number))
        return seated

    def _keeps(self, scores: Tensor) -> Tensor:
        close = (scores[:, None] - scores).abs() <= SAME_SCORE * scores  # [N, N]
        unlike_others = close.sum(dim=0) == 1  # itself
        below_mean = scores < scores.mean()
        if self.filter == "text":
            return below_mean & unlike_others
        return below_mean | unlike_others


class Measures(NamedTuple):
    """What is known of each client before its distribution is: [N] float64."""

    shift: Tensor  # D
    mean: Tensor  # of W
    rms: Tensor  # of u
    error: Tensor  # e


def _posterior(c: float, h: float, mean: float, n_values: int) -> tuple[float, float]:
    """(c, H) after Eq. 1."""
    return c + n_values, c / (c + n_values) * h + mean / c


def _normal_of(values: Tensor) -> Normal:
    _, sums, norms = _products(values[None], values)
    mean = sums.item() / len(values)
    return Normal(mean, max(norms.item() ** 2 / len(values) - mean**2, LEAST_VARIANCE))


def _products(updates: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """u.other, the sum and the norm of every u: [N] each, float64, in one pass."""
    along, sums, squared = torch.zeros(3, len(updates), dtype=torch.float64, device=other.device)
    for columns, rows in in_double(updates):
        along += rows @ other[columns].double()
        sums += rows.sum(dim=1)
        squared += torch.linalg.vector_norm(rows, dim=1) ** 2
    return along.cpu(), sums.cpu(), squared.sqrt().cpu()
