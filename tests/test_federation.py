"""federation: random draws, screening of hostile rows, and how the global model is updated."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from shipped import shipped
from torch import Tensor, nn

from fedbench.attack import ATTACKS, Attack, AttackView
from fedbench.defense import DEFENSES, Aggregate, Defense, ServerView, mean_of
from fedbench.errors import UserError
from fedbench.federation import Federation
from fedbench.results.checkpoint import Checkpoint
from fedbench.results.run_dir import Record

Make = Callable[..., Federation]


@dataclass(frozen=True)
class RecordingFedAvg(Defense):
    """Averages, and stores its inputs in its state."""

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        inputs = {"updates": updates.clone(), "ids": view.client_ids, "index": view.index}
        return mean_of(updates, torch.ones(len(updates), dtype=torch.bool)), inputs


@dataclass(frozen=True)
class Hostile(Attack):
    """Sends `rows(updates)` instead of the malicious updates."""

    rows: Any = None

    def collude(self, updates: Tensor, view: AttackView) -> Tensor | Sequence[Tensor]:
        return self.rows(updates)


def start(federation: Federation) -> Checkpoint:
    return replace(federation.initial(), next_round=0)


def updates_of(federation: Federation) -> Tensor:
    end, _ = federation.round(start(federation))
    return end.defense_state["updates"]


def test_a_round_records_the_threshold(federation: Make) -> None:
    _, record = federation(DEFENSES.build({"name": "auror", "tau": 0.25})).round(
        start(federation())
    )
    assert record["threshold"] == 0.25
    _, record = federation(RecordingFedAvg()).round(start(federation()))
    assert record["threshold"] is None


def test_a_threshold_that_is_no_number_is_a_user_error(federation: Make) -> None:
    class Wrong(RecordingFedAvg):
        def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
            outcome, state = super().aggregate(updates, state, view)
            return replace(outcome, threshold=torch.tensor([1.0])), state

    with pytest.raises(UserError, match="threshold must be a finite number or None"):
        federation(Wrong()).round(start(federation()))


def test_same_seed_gives_the_same_bits(federation: Make) -> None:
    first, second = (
        federation(RecordingFedAvg()).round(start(federation(RecordingFedAvg()))) for _ in range(2)
    )
    assert torch.equal(first[0].params, second[0].params)
    without_time = [{**record, "seconds": None} for _, record in (first, second)]
    assert without_time[0] == without_time[1]


def test_another_seed_gives_other_updates(federation: Make) -> None:
    assert not torch.equal(
        updates_of(federation(RecordingFedAvg(), seed=1)), updates_of(federation(RecordingFedAvg()))
    )


def test_training_does_not_depend_on_the_order_of_clients(federation: Make) -> None:
    server = federation(RecordingFedAvg())
    round_ = server._select(start(server))
    reversed_round = replace(round_, participants=round_.participants[::-1])
    updates, _ = server.ranks.train(round_)
    reversed_updates, _ = server.ranks.train(reversed_round)
    assert torch.equal(updates, reversed_updates.flip(0))


def test_honest_updates_do_not_depend_on_the_attack(federation: Make) -> None:
    attacked = federation(RecordingFedAvg())
    benign = federation(RecordingFedAvg(), ATTACKS.build({"name": "none"}))
    honest = torch.tensor([not p.malicious for p in attacked.rank_context.selection.select(0)])
    assert honest.sum() == 4
    assert torch.equal(updates_of(attacked)[honest], updates_of(benign)[honest])
    assert not torch.equal(updates_of(attacked)[~honest], updates_of(benign)[~honest])


def test_malicious_clients_are_honest_before_the_attack_starts(federation: Make) -> None:
    later = federation(RecordingFedAvg(), attack_start=1)
    benign = federation(RecordingFedAvg(), ATTACKS.build({"name": "none"}))
    assert torch.equal(updates_of(later), updates_of(benign))
    _, record = later.round(start(later))
    assert record["attacked"] is False
    assert not any(client["malicious"] for client in record["clients"])
    _, record = later.round(replace(start(later), next_round=1))
    assert record["attacked"] is True
    assert sum(client["malicious"] for client in record["clients"]) == 2


@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_global_model_moves_by_server_lr_times_the_update(
    federation: Make, server_lr: float
) -> None:
    server = federation(RecordingFedAvg(), server_lr=server_lr)
    begin = start(server)
    end, _ = server.round(begin)
    mean = end.defense_state["updates"].mean(dim=0)
    torch.testing.assert_close(end.params, begin.params + server_lr * mean)
    assert end.next_round == 1


HOSTILE = {
    "nan": lambda u: torch.full_like(u, torch.nan),
    "one nan": lambda u: torch.cat([u[:, :-1], torch.full_like(u[:, :1], torch.nan)], dim=1),
    "inf": lambda u: torch.full_like(u, torch.inf),
    "too long": lambda u: torch.zeros(len(u), u.shape[1] + 1),
    "too short": lambda u: [torch.zeros(3) for _ in u],
    "a matrix": lambda u: [row.view(1, -1) for row in u],
    "empty": lambda u: [torch.zeros(0) for _ in u],
    "too large for float32": lambda u: [row.double() + 1e300 for row in u],
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("defense", shipped(DEFENSES))
def test_hostile_rows_are_refused_and_the_others_aggregated(
    federation: Make, kind: str, defense: str
) -> None:
    server = federation(DEFENSES.build({"name": defense}), Hostile(rows=HOSTILE[kind]))
    end, record = server.round(start(server))
    assert end.params.isfinite().all()
    assert not torch.equal(end.params, start(server).params), "honest rows must count"
    for client in record["clients"]:
        assert ("refused" in client) == client["malicious"]
        if client["malicious"]:
            assert client["weight"] == 0
            assert client["score"] is None
            assert client["accepted"] in (False, None)


def test_only_the_malformed_row_is_refused(federation: Make) -> None:
    server = federation(RecordingFedAvg(), Hostile(rows=lambda u: [torch.zeros(3), u[1]]))
    end, record = server.round(start(server))
    assert sum("refused" in client for client in record["clients"]) == 1
    assert len(end.defense_state["updates"]) == 5
    ids = [c["id"] for c in record["clients"] if "refused" not in c]
    assert end.defense_state["ids"].tolist() == ids


@pytest.mark.parametrize("huge", [1e30, 3e38])
@pytest.mark.parametrize("defense", shipped(DEFENSES))
def test_huge_rows_never_break_the_global_model(
    federation: Make, defense: str, huge: float
) -> None:
    server = federation(
        DEFENSES.build({"name": defense}), Hostile(rows=lambda u: torch.full_like(u, huge))
    )
    state = start(server)
    for _ in range(2):  # the second starts from the model after the first
        state, record = server.round(state)
        assert state.params.isfinite().all()
        assert 0 <= record["MA"] <= 1


def test_global_model_stays_if_every_row_is_refused(federation: Make) -> None:
    server = federation(RecordingFedAvg(), Hostile(rows=lambda u: u * torch.nan), pmr=1.0)
    end, record = server.round(start(server))
    assert torch.equal(end.params, start(server).params)
    assert all(client["weight"] == 0 for client in record["clients"])
    assert record["applied"] is False
    assert record["MA"] > 0


def test_global_model_stays_if_too_few_rows_are_left_for_krum(federation: Make) -> None:
    krum = DEFENSES.build({"name": "krum"})
    server = federation(krum, Hostile(rows=lambda u: u * torch.nan), pmr=0.67)  # leaves 2 of 6
    end, record = server.round(start(server))
    assert torch.equal(end.params, start(server).params)
    assert [client["accepted"] for client in record["clients"]] == [None] * 6, "nobody was judged"
    assert (record["TPR"], record["TNR"], record["applied"]) == (None, None, False)


def test_infinite_update_is_not_applied_and_the_defense_forgets_the_round(federation: Make) -> None:
    server = federation(RecordingFedAvg(), Hostile(rows=lambda u: torch.full_like(u, 3e38)))
    begin = start(server)
    end, record = server.round(begin)
    assert torch.equal(end.params, begin.params)
    assert record["applied"] is False
    assert end.defense_state is None


def test_defense_may_compute_in_another_dtype(federation: Make) -> None:
    @dataclass(frozen=True)
    class Double(Defense):
        def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Any, Any]:
            wide = updates.double()
            share = torch.full((len(wide),), 1 / len(wide), dtype=torch.float64)
            return Aggregate(share @ wide, share, share > 0, share), state

    server = federation(Double(), network=TestBatchNorm.network())
    end, record = server.round(start(server))
    assert end.params.dtype == end.buffers.dtype == torch.float32
    assert record["applied"] is True


def test_nan_scores_are_a_user_error(federation: Make) -> None:
    @dataclass(frozen=True)
    class NanScores(Defense):
        def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Any, Any]:
            everyone = torch.ones(len(updates), dtype=torch.bool)
            return mean_of(updates, everyone, updates[:, 0] * torch.nan), state

    server = federation(NanScores())
    with pytest.raises(UserError, match="scores must not be NaN"):
        server.round(start(server))


@dataclass(frozen=True)
class WithDetails(Defense):
    """Accepts all clients; its details are the norm and position of each row."""

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        outcome = mean_of(updates, torch.ones(len(updates), dtype=torch.bool))
        details = {"norm": updates.norm(dim=1), "position": torch.arange(len(updates))}
        return replace(outcome, details=details), state


def test_details_are_recorded_per_client(federation: Make) -> None:
    def first_is_nan(updates: Tensor) -> Tensor:
        return torch.cat([torch.full_like(updates[:1], torch.nan), updates[1:]])

    server = federation(WithDetails(), Hostile(rows=first_is_nan))
    _, record = server.round(start(server))
    refused = [client for client in record["clients"] if "refused" in client]
    judged = [client for client in record["clients"] if "refused" not in client]
    assert len(refused) == 1
    assert "details" not in refused[0]
    assert [client["details"]["position"] for client in judged] == list(range(len(judged)))
    assert all(client["details"]["norm"] > 0 for client in judged)
    _, plain = federation(RecordingFedAvg()).round(start(federation(RecordingFedAvg())))
    assert not any("details" in client for client in plain["clients"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.zeros(2), r"details\['extra'\] must be .* shape \(6,\), got .* \(2,\)"),
        (torch.full((6,), torch.nan), r"details\['extra'\] must not be NaN"),
    ],
)
def test_malformed_details_are_a_user_error(federation: Make, values: Tensor, message: str) -> None:
    @dataclass(frozen=True)
    class MalformedDetails(Defense):
        def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
            outcome = mean_of(updates, torch.ones(len(updates), dtype=torch.bool))
            return replace(outcome, details={"extra": values}), state

    server = federation(MalformedDetails())
    with pytest.raises(UserError, match=message):
        server.round(start(server))


def test_diverging_pretraining_is_a_user_error(federation: Make) -> None:
    deep = nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.ReLU(), nn.Linear(8, 10))
    server = federation(lr=1e30, pretrain_rounds=1, network=deep)
    with pytest.raises(UserError, match=r"lr=1e\+30: pretraining diverges"):
        server.pretrain(server.initial())


def test_malformed_update_of_a_defense_is_a_user_error(federation: Make) -> None:
    @dataclass(frozen=True)
    class ShortUpdate(Defense):
        def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Any, Any]:
            return Aggregate(updates[0][:-1], torch.ones(len(updates))), state

    server = federation(ShortUpdate())
    with pytest.raises(UserError, match=r"defense ShortUpdate: update must be .* shape \(7850,\)"):
        server.round(start(server))


def test_attack_that_returns_too_few_rows_is_a_user_error(federation: Make) -> None:
    server = federation(RecordingFedAvg(), Hostile(rows=lambda u: u[:1]))
    expected = r"shape \(2, 7850\) or a list of its rows, got .* \(1, 7850\)"
    with pytest.raises(UserError, match=expected):
        server.round(start(server))


class ShiftAndScale(nn.Module):
    """Changes mean and variance of its input, so that batch norm has statistics to learn."""

    def forward(self, x: Tensor) -> Tensor:
        return 5 * x + 10


class TestBatchNorm:
    """Running statistics are sent and aggregated along with the parameters."""

    @staticmethod
    def network() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(784, 8), ShiftAndScale(), nn.BatchNorm1d(8), nn.Linear(8, 10)
        )

    def test_statistics_may_be_averaged_with_the_weights(self, federation: Make) -> None:
        @dataclass(frozen=True)
        class Weighted(Defense):
            averages_buffers: ClassVar[bool] = True

            def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Any, Any]:
                weights = torch.tensor([0.75, 0.25, 0, 0, 0, 0])
                return Aggregate(weights @ updates, weights, weights > 0), state

        server = federation(Weighted(), network=self.network())
        begin = start(server)
        _, buffers = server.ranks.train(server._select(begin))
        end, _ = server.round(begin)
        assert buffers.shape == (6, 16)
        assert not torch.allclose(buffers[0], buffers[1])
        torch.testing.assert_close(end.buffers, 0.75 * buffers[0] + 0.25 * buffers[1])

    def test_statistics_stay_if_nobody_is_accepted(self, federation: Make) -> None:
        @dataclass(frozen=True)
        class RejectAll(Defense):
            def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Any, Any]:
                return mean_of(updates, torch.zeros(len(updates), dtype=torch.bool)), state

        server = federation(RejectAll(), network=self.network())
        end, _ = server.round(start(server))
        assert torch.equal(end.buffers, start(server).buffers)

    def test_evaluation_uses_the_aggregated_statistics(self, federation: Make) -> None:
        """With the initial statistics, the accuracy is clearly lower."""
        server = federation(
            RecordingFedAvg(), ATTACKS.build({"name": "none"}), self.network(), lr=0.2
        )
        state = start(server)
        for _ in range(5):
            state, record = server.round(state)
        initial = server._evaluate(replace(state, buffers=start(server).buffers))[0]
        assert server._evaluate(state)[0] == record["MA"]
        assert record["MA"] > initial + 0.05

    def test_single_left_over_sample_does_not_break_batch_norm(self, federation: Make) -> None:
        n_samples = len(federation().rank_context.data.shards[0])
        server = federation(RecordingFedAvg(), network=self.network(), batch_size=n_samples - 1)
        server.round(start(server))


class TestSelection:
    def test_rounds_draw_their_clients_from_the_pool(self, federation: Make) -> None:
        rank_context = federation(pool=20, n_clients=6, pmr=0.5).rank_context
        rounds = [rank_context.selection.select(index) for index in range(10)]
        for participants in rounds:
            ids = [p.client for p in participants]
            assert ids == sorted(set(ids))
            assert len(ids) == 6
            assert sum(p.malicious for p in participants) == 3
            assert {p.client for p in participants if p.malicious} <= set(
                rank_context.selection.malicious
            )
        assert len({tuple(p.client for p in participants) for participants in rounds}) > 1
        assert len(rank_context.selection.malicious) == 10

    def test_larger_pmr_only_adds_malicious_clients(self, federation: Make) -> None:
        few, many = (
            set(federation(pmr=pmr).rank_context.selection.malicious) for pmr in (0.34, 0.67)
        )
        assert few < many

    @pytest.mark.parametrize(("pmr", "n"), [(0, 0), (0.2, 6), (0.3, 9), (0.5, 15), (1, 30)])
    def test_number_of_malicious_clients_is_exact(
        self, federation: Make, pmr: float, n: int
    ) -> None:
        participants = federation(pmr=pmr, n_clients=30).rank_context.selection.select(0)
        assert sum(p.malicious for p in participants) == n

    def test_pretraining_is_benign_and_does_not_depend_on_pmr(self, federation: Make) -> None:
        few, many = (
            federation(pool=20, pmr=pmr).rank_context.selection.select(-3) for pmr in (0.0, 0.5)
        )
        assert few == many
        assert not any(p.malicious for p in many)


def test_pretraining_is_fedavg(federation: Make) -> None:
    server = federation(RecordingFedAvg(), ATTACKS.build({"name": "none"}), pretrain_rounds=2)
    begin = server.initial()
    assert begin.next_round == -2
    updates, _ = server.ranks.train(server._select(begin))
    end = server.pretrain(begin)
    torch.testing.assert_close(end.params, begin.params + updates.mean(dim=0))
    assert end.next_round == -1
    assert torch.equal(end.initial_params, end.params)


def test_backdoor_succeeds_without_a_defense_and_only_with_an_attack(
    after_rounds: Callable[..., Record],
) -> None:
    assert after_rounds(ATTACKS.build({"name": "constrain_and_scale"}))["BA"] > 0.8
    assert after_rounds(ATTACKS.build({"name": "none"}))["BA"] < 0.2


def test_evaluate_every_skips_rounds_except_the_last(federation: Make) -> None:
    server = federation(rounds=5, evaluate_every=2)
    original = server.ranks.evaluate
    evaluated: list[Tensor] = []

    def evaluate(params: Tensor, buffers: Tensor) -> list[float | None]:
        evaluated.append(params)
        return original(params, buffers)

    server.ranks.evaluate = evaluate  # type: ignore[method-assign]
    state, records = replace(server.initial(), next_round=0), []
    for _ in range(5):
        state, record = server.round(state)
        records.append(record)
    due = [False, True, False, True, True]  # every second round and the last one
    for key in ("MA", "BA"):
        assert [record[key] is not None for record in records] == due
    assert [record["BA_by_backdoor"]["0"] is not None for record in records] == due
    assert len(evaluated) == 3


def test_evaluating_less_often_does_not_change_the_model(federation: Make) -> None:
    results = []
    for every in (1, 3):
        server = federation(rounds=3, evaluate_every=every)
        state = replace(server.initial(), next_round=0)
        for _ in range(3):
            state, record = server.round(state)
        results.append((state.params, record["MA"], record["BA"]))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]


@pytest.mark.parametrize("n_parts", [1, 2, 3, 7])
def test_shares_of_an_evaluation_add_up(federation: Make, n_parts: int) -> None:
    server = federation()
    rank_context, start = server.rank_context, server.initial()
    whole = rank_context.evaluator.count_correct(start.params, start.buffers, 0, 1)
    parts = [
        rank_context.evaluator.count_correct(start.params, start.buffers, i, n_parts)
        for i in range(n_parts)
    ]
    assert torch.equal(sum(parts), whole)
    assert whole.sum() > 0


def test_a_round_reports_its_progress_client_by_client(
    federation: Callable[..., Federation],
) -> None:
    """Shares grow with each client's work and end at 1, in benign rounds as well."""
    server = federation(n_clients=4)
    shares: list[float] = []
    server.ranks.on_trained = shares.append
    start = server.initial()
    participants = server.rank_context.selection.select(0)
    costs = [server.rank_context.data.cost(0, p) for p in participants]
    server.round(replace(start, next_round=0))
    steps = [after - before for before, after in itertools.pairwise([0.0, *shares])]
    assert sorted(steps) == pytest.approx(sorted(cost / sum(costs) for cost in costs))
    shares.clear()
    server.pretrain(replace(start, next_round=-1))
    assert len(shares) == 4
    assert shares[-1] == 1
