"""BayBFed by its definition, as an oracle for tests: every coordinate, with 34 digits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mpmath
import numpy as np

mp = mpmath.MPContext()
mp.dps = 34

Row = Sequence[float] | np.ndarray


@dataclass(eq=False)
class Cluster:
    """A normal over weights. Clusters are numbered from 0 in order of creation."""

    mu: Any
    s2: Any
    n: int
    number: int


@dataclass
class Client:
    """A client in the current round, with weights w: x = w + D, m = mean(x)."""

    x: Any
    m: Any
    mean: Any  # mean of w
    error: Any  # (d D)^2, before the floor
    e: Any = None
    base: Any = None
    p: Any = None
    divergence: Any = None  # the largest
    number: int = -1  # of the cluster it joined


@dataclass
class Verdict:
    """Result of a round. `unsure` lists the decisions that rounding could change."""

    scores: list[float]
    kept: list[bool]
    numbers: list[int]
    bases: list[float]
    clusters: list[tuple[float, float, int, int]]  # mu, s2, n, number
    unsure: list[str]


def median(values: Sequence[Any]) -> Any:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


class Oracle:
    """Runs rounds on plain lists. `concentration` gives the initial c by client id."""

    def __init__(
        self,
        initial: Row,
        concentration: Mapping[int, float],
        *,
        weights: str = "update",
        cosine: str = "distance",
        scoring: str = "round",
        cold_start: str = "seat",
        tau: str = "client",
        assign: str = "max",
        persist: bool = True,
        score: str = "distance",
        mu0: float = 0.0,
        sigma0_sq: float | str = 9.0,
        error_floor: float = 0.5,
        max_clusters: int | None = None,
        filter: str = "text",
    ) -> None:
        self.length = len(initial)
        self.mu_p = mp.fsum(initial) / self.length
        self.v_p = mp.fsum((mp.mpf(w) - self.mu_p) ** 2 for w in initial) / self.length
        self.posterior = {i: (mp.mpf(c), self.mu_p) for i, c in concentration.items()}
        self.weights, self.cosine, self.tau = weights, cosine, tau
        self.scoring, self.cold_start = scoring, cold_start
        self.assign, self.persist, self.score, self.filter = assign, persist, score, filter
        self.mu0, self.error_floor = mp.mpf(mu0), mp.mpf(error_floor)
        self.sigma0_sq, self.max_clusters = sigma0_sq, max_clusters
        self.s0 = mp.mpf(0)
        self.clusters: list[Cluster] = []
        self.opened = 0
        self.unsure: list[str] = []

    def round(self, updates: Iterable[Row], ids: Sequence[int], global_params: Row) -> Verdict:
        self.unsure = []
        if not self.persist:
            self.clusters = []
        clients = [self.measure(update, global_params) for update in updates]
        median_error = median([client.error for client in clients])
        for client, client_id in zip(clients, ids, strict=True):
            client.e = max(client.error, self.error_floor * median_error, mp.mpf("1e-12"))
            client.base = self.update_posterior(client_id, client.mean)
            client.p = self.p(client)
        auto = self.sigma0_sq == "auto"
        self.s0 = 9 * median([c.e for c in clients]) if auto else mp.mpf(self.sigma0_sq)
        in_order = [clients[i] for i in sorted(range(len(ids)), key=lambda i: ids[i])]
        if self.scoring == "round":
            self.join_together(in_order)
        else:
            self.join_sequentially(in_order)
        distance = self.score == "distance"
        scores = [mp.sqrt(c.divergence) if distance else c.divergence for c in clients]
        return Verdict(
            scores=[float(score) for score in scores],
            kept=self.keep(scores),
            numbers=[client.number for client in clients],
            bases=[float(client.base) for client in clients],
            clusters=[(float(c.mu), float(c.s2), c.n, c.number) for c in self.clusters],
            unsure=self.unsure,
        )

    def join_together(self, clients: Sequence[Client]) -> None:
        """All clients choose among the clusters from the start of the round, then join in order.

        Without clusters, each client opens a new one. `seat` then scores the clients again, against
        these clusters and a new one, and changes nothing else. `score` keeps the scores against a
        new cluster only.
        """
        cold = not self.clusters
        choices = [self.choose(client) for client in clients]
        for client, choice in zip(clients, choices, strict=True):
            self.join(client, choice)
        if cold and self.cold_start == "seat":
            for client in clients:
                self.evaluate(client)

    def join_sequentially(self, clients: Sequence[Client]) -> None:
        """Algorithm 1: each client sees the clusters that the clients before it changed.

        It assigns its first client before scoring it, whatever `cold_start` is.
        """
        for client in clients:
            if self.clusters:
                self.join(client, self.choose(client))
            else:
                self.join(client, None)
                self.evaluate(client)

    def measure(self, update: Row, global_params: Row) -> Client:
        """Eq. 2 and 3."""
        u = [mp.mpf(value) for value in update]
        g = [mp.mpf(value) for value in global_params]
        w = u if self.weights == "update" else [a + b for a, b in zip(u, g, strict=True)]
        norm_u, norm_w, norm_g = (mp.sqrt(mp.fsum(a * a for a in row)) for row in (u, w, g))
        dot = mp.fsum(a * b for a, b in zip(w, g, strict=True))
        similarity = dot / norm_w / norm_g if norm_w > 0 and norm_g > 0 else mp.mpf(0)
        shift, mean = self.shift(similarity), mp.fsum(w) / self.length
        return Client([a + shift for a in w], mean + shift, mean, (norm_u * shift) ** 2)

    def shift(self, similarity: Any) -> Any:
        similarity = min(max(similarity, mp.mpf(-1)), mp.mpf(1))
        if self.cosine == "distance":
            return 1 - similarity
        if self.cosine == "similarity":
            return similarity
        if 1 - abs(similarity) < 1e-8:
            self.unsure.append("angle near 0 or pi")
        return mp.acos(similarity) / mp.pi

    def update_posterior(self, client_id: int, mean: Any) -> Any:
        """Eq. 1."""
        c, base = self.posterior[client_id]
        base = c / (c + self.length) * base + mean / c
        self.posterior[client_id] = (c + self.length, base)
        return base

    def p(self, client: Client) -> Any:
        """Eq. 4, normalized over the coordinates."""
        exponents = []
        variance = max(client.m**2, mp.mpf("1e-24"))
        for x in client.x:
            peak = 1 / mp.sqrt(2 * mp.pi * self.v_p)
            g = peak * mp.exp(-((x - self.mu_p) ** 2) / (2 * self.v_p)) + client.base
            exponents.append((g - 1) ** 2 / (2 * variance))
        if abs(client.m) < 1e-4 or min(exponents) > 1e3:
            self.unsure.append("p is a spike")
        return self.normalized(exponents)

    def q(self, client: Client, mu: Any, s2: Any) -> Any:
        """Eq. 5, normalized over the coordinates."""
        exponents = [(x - mu) ** 2 / (2 * s2) for x in client.x]
        if min(exponents) > 1e3:
            self.unsure.append("q is a spike")
        return self.normalized(exponents)

    def normalized(self, exponents: Sequence[Any]) -> list[Any]:
        least = min(exponents)
        values = [mp.exp(least - exponent) for exponent in exponents]
        total = mp.fsum(values)
        return [value / total for value in values]

    def jensen_shannon(self, p: Any, q: Any) -> Any:
        terms = []
        for a, b in zip(p, q, strict=True):
            mixture = (a + b) / 2
            terms += [value * mp.log(value / mixture) / 2 for value in (a, b) if value > 0]
        return mp.fsum(terms)

    def evaluate(self, client: Client) -> list[Any]:
        """Return the divergences from each cluster and from a new one; store the largest."""
        normals = self.normals(client)
        found = [self.jensen_shannon(client.p, self.q(client, mu, s2)) for mu, s2 in normals]
        if 1e-22 < max(found) < 1e-18:
            self.unsure.append("divergence near the least one")
        found = [divergence if divergence >= 1e-20 else mp.mpf(0) for divergence in found]
        client.divergence = max(found)
        return found

    def choose(self, client: Client) -> Cluster | None:
        """Score the client; return the cluster to join, or None for a new one."""
        found = self.evaluate(client)
        best = found.index(max(found) if self.assign == "max" else min(found))
        normals = self.normals(client)
        for normal, divergence in zip(normals, found, strict=True):
            apart = abs(mp.sqrt(divergence) - mp.sqrt(found[best]))
            if normal != normals[best] and max(divergence, found[best]) > 0 and apart < 1e-8:
                self.unsure.append("tie between clusters")
        return [*self.clusters, None][best]

    def normals(self, client: Client) -> list[tuple[Any, Any]]:
        return [*((c.mu, c.s2) for c in self.clusters), (self.mu0, self.s0 + client.e)]

    def join(self, client: Client, cluster: Cluster | None) -> None:
        """Eq. 6 and 7."""
        if cluster is None or cluster not in self.clusters:
            if self.max_clusters == len(self.clusters):
                self.clusters.pop(0)
            cluster = Cluster(self.mu0, self.s0 + client.e, 0, self.opened)
            self.opened += 1
            self.clusters.append(cluster)
        tau = 1 / (client.e if self.tau == "client" else cluster.s2)
        tau0 = 1 / self.s0
        cluster.n += 1
        z = cluster.n * tau + tau0
        cluster.mu = (client.m * cluster.n * tau + self.mu0 * tau0) / z
        cluster.s2 = 1 / z + client.e
        client.number = cluster.number

    def keep(self, scores: Sequence[Any]) -> list[bool]:
        mean = mp.fsum(scores) / len(scores)
        kept = []
        for i, score in enumerate(scores):
            tied = False
            for other in [*scores[:i], *scores[i + 1 :]]:
                larger = max(score, other)
                apart = abs(score - other) / larger if larger > 0 else mp.mpf(0)
                distance = larger if self.score == "distance" else mp.sqrt(larger)
                tied = tied or apart <= 1e-9
                if 1e-10 < apart < 1e-8 or (0 < distance < 1e-4 and apart < 1e-13 / distance):
                    self.unsure.append("tie between scores")
            near = len(scores) > 1 and abs(score - mean) <= 1e-8 * mean + 1e-10
            if near and tied == (self.filter == "pseudocode"):
                self.unsure.append("score at the mean")
            below = score < mean
            kept.append(below and not tied if self.filter == "text" else below or not tied)
        return kept


class VectorizedOracle(Oracle):
    """The same in numpy long double, for many coordinates."""

    def measure(self, update: Row, global_params: Row) -> Client:
        u, g = (np.asarray(row, dtype=np.longdouble) for row in (update, global_params))
        w = u if self.weights == "update" else u + g
        norms = float(np.sqrt((w * w).sum()) * np.sqrt((g * g).sum()))
        shift = float(self.shift(float((w * g).sum()) / norms if norms else 0.0))
        mean = float(w.mean())
        error = float((u * u).sum()) * shift**2
        return Client(w + shift, mp.mpf(mean + shift), mp.mpf(mean), mp.mpf(error))

    def p(self, client: Client) -> Any:
        mu, v = float(self.mu_p), float(self.v_p)
        g = np.exp(-((client.x - mu) ** 2) / (2 * v)) / np.sqrt(2 * np.pi * v) + float(client.base)
        return self.normalized((g - 1) ** 2 / (2 * max(float(client.m) ** 2, 1e-24)))

    def q(self, client: Client, mu: Any, s2: Any) -> Any:
        return self.normalized((client.x - float(mu)) ** 2 / (2 * float(s2)))

    def normalized(self, exponents: Any) -> Any:
        values = np.exp(exponents.min() - exponents)
        return values / values.sum()

    def jensen_shannon(self, p: Any, q: Any) -> Any:
        mixture = (p + q) / 2
        with np.errstate(divide="ignore", invalid="ignore"):
            terms = [np.where(a > 0, a * np.log(a / mixture), 0) for a in (p, q)]
        return mp.mpf(float(terms[0].sum() + terms[1].sum()) / 2)
