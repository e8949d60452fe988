"""The round loop: the same draws whatever the defense, hostile rows refused, one rule to apply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedbench.attack import ATTACKS, Attack, AttackView
from fedbench.defense import DEFENSES, Aggregate, Defense, ServerView, mean_of
from fedbench.errors import UserError
from fedbench.federation import Federation
from fedbench.results.checkpoint import Checkpoint
from fedbench.results.run_dir import Record

Make = Callable[..., Federation]


@dataclass(frozen=True)
class Spy(Defense):
    """Averages, and remembers in its state what it was given."""

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        seen = {"updates": updates.clone(), "ids": view.client_ids, "index": view.index}
        return mean_of(updates, torch.ones(len(updates), dtype=torch.bool)), seen


@dataclass(frozen=True)
class Hostile(Attack):
    """Sends `rows` in place of the malicious updates."""

    rows: Any = None

    def collude(self, updates: Tensor, view: AttackView) -> Tensor | Sequence[Tensor]:
        return self.rows(updates)


def start(federation: Federation) -> Checkpoint:
    return replace(federation.initial(), next_round=0)


def updates_of(federation: Federation) -> Tensor:
    end, _ = federation.round(start(federation))
    return end.defense_state["updates"]


def test_same_seed_gives_the_same_bits(federation: Make) -> None:
    first, second = (federation(Spy()).round(start(federation(Spy()))) for _ in range(2))
    assert torch.equal(first[0].params, second[0].params)
    without_time = [{**record, "seconds": None} for _, record in (first, second)]
    assert without_time[0] == without_time[1]


def test_another_seed_gives_others(federation: Make) -> None:
    assert not torch.equal(updates_of(federation(Spy(), seed=1)), updates_of(federation(Spy())))


def test_clients_train_alike_whatever_the_order_they_are_trained_in(federation: Make) -> None:
    made = federation(Spy())
    round_ = made._select(start(made))
    backwards = replace(round_, participants=round_.participants[::-1])
    updates, _ = made.ranks.train(round_)
    reversed_updates, _ = made.ranks.train(backwards)
    assert torch.equal(updates, reversed_updates.flip(0))


def test_honest_updates_do_not_depend_on_the_attack(federation: Make) -> None:
    attacked = federation(Spy())
    benign = federation(Spy(), ATTACKS.build({"name": "none"}))
    honest = torch.tensor([not p.malicious for p in attacked.simulation.selection.select(0)])
    assert honest.sum() == 4
    assert torch.equal(updates_of(attacked)[honest], updates_of(benign)[honest])
    assert not torch.equal(updates_of(attacked)[~honest], updates_of(benign)[~honest])


def test_malicious_clients_are_honest_before_the_attack_starts(federation: Make) -> None:
    later = federation(Spy(), attack_start=1)
    benign = federation(Spy(), ATTACKS.build({"name": "none"}))
    assert torch.equal(updates_of(later), updates_of(benign))
    _, record = later.round(start(later))
    assert record["attacked"] is False
    assert not any(client["malicious"] for client in record["clients"])
    _, record = later.round(replace(start(later), next_round=1))
    assert record["attacked"] is True
    assert sum(client["malicious"] for client in record["clients"]) == 2


@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_the_global_model_moves_by_server_lr_times_the_update(
    federation: Make, server_lr: float
) -> None:
    made = federation(Spy(), server_lr=server_lr)
    begin = start(made)
    end, _ = made.round(begin)
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
@pytest.mark.parametrize("defense", DEFENSES.names())
def test_hostile_rows_are_refused_and_the_rest_is_aggregated(
    federation: Make, kind: str, defense: str
) -> None:
    made = federation(DEFENSES.build({"name": defense}), Hostile(rows=HOSTILE[kind]))
    end, record = made.round(start(made))
    assert end.params.isfinite().all()
    assert not torch.equal(end.params, start(made).params), "the honest rows still count"
    for client in record["clients"]:
        assert ("refused" in client) == client["malicious"]
        if client["malicious"]:
            assert client["weight"] == 0
            assert client["score"] is None
            assert client["accepted"] in (False, None)


def test_one_wrong_row_among_good_ones_is_refused_alone(federation: Make) -> None:
    made = federation(Spy(), Hostile(rows=lambda u: [torch.zeros(3), u[1]]))
    end, record = made.round(start(made))
    assert sum("refused" in client for client in record["clients"]) == 1
    assert len(end.defense_state["updates"]) == 5
    ids = [c["id"] for c in record["clients"] if "refused" not in c]
    assert end.defense_state["ids"].tolist() == ids


@pytest.mark.parametrize("huge", [1e30, 3e38])
@pytest.mark.parametrize("defense", DEFENSES.names())
def test_huge_rows_never_break_the_global_model(
    federation: Make, defense: str, huge: float
) -> None:
    made = federation(
        DEFENSES.build({"name": defense}), Hostile(rows=lambda u: torch.full_like(u, huge))
    )
    state = start(made)
    for _ in range(2):  # also from the model that the first round leaves
        state, record = made.round(state)
        assert state.params.isfinite().all()
        assert 0 <= record["MA"] <= 1


def test_when_every_row_is_refused_the_global_model_stays(federation: Make) -> None:
    made = federation(Spy(), Hostile(rows=lambda u: u * torch.nan), pmr=1.0)
    end, record = made.round(start(made))
    assert torch.equal(end.params, start(made).params)
    assert all(client["weight"] == 0 for client in record["clients"])
    assert record["applied"] is False
    assert record["MA"] > 0


def test_too_few_rows_left_for_krum_keep_the_global_model(federation: Make) -> None:
    krum = DEFENSES.build({"name": "krum"})
    made = federation(krum, Hostile(rows=lambda u: u * torch.nan), pmr=0.67)  # 2 of 6 are left
    end, record = made.round(start(made))
    assert torch.equal(end.params, start(made).params)
    assert [client["accepted"] for client in record["clients"]] == [None] * 6, "nobody was judged"
    assert (record["TPR"], record["TNR"], record["applied"]) == (None, None, False)


def test_an_update_that_adds_up_to_infinity_is_not_applied_and_forgotten(federation: Make) -> None:
    made = federation(Spy(), Hostile(rows=lambda u: torch.full_like(u, 3e38)))
    begin = start(made)
    end, record = made.round(begin)
    assert torch.equal(end.params, begin.params)
    assert record["applied"] is False
    assert end.defense_state is None


def test_a_defense_may_compute_in_another_type(federation: Make) -> None:
    @dataclass(frozen=True)
    class Double(Defense):
        def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Any, Any]:
            wide = updates.double()
            share = torch.full((len(wide),), 1 / len(wide), dtype=torch.float64)
            return Aggregate(share @ wide, share, share > 0, share), state

    made = federation(Double(), network=TestBatchNorm.network())
    end, record = made.round(start(made))
    assert end.params.dtype == end.buffers.dtype == torch.float32
    assert record["applied"] is True


def test_a_score_that_is_not_a_number_is_told(federation: Make) -> None:
    @dataclass(frozen=True)
    class Lost(Defense):
        def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Any, Any]:
            everyone = torch.ones(len(updates), dtype=torch.bool)
            return mean_of(updates, everyone, updates[:, 0] * torch.nan), state

    made = federation(Lost())
    with pytest.raises(UserError, match="scores must not be NaN"):
        made.round(start(made))


@dataclass(frozen=True)
class Verbose(Defense):
    """Accepts everyone and records each row's length and place."""

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        outcome = mean_of(updates, torch.ones(len(updates), dtype=torch.bool))
        details = {"length": updates.norm(dim=1), "place": torch.arange(len(updates))}
        return replace(outcome, details=details), state


def test_details_are_recorded_with_their_client(federation: Make) -> None:
    def first_is_nan(updates: Tensor) -> Tensor:
        return torch.cat([torch.full_like(updates[:1], torch.nan), updates[1:]])

    made = federation(Verbose(), Hostile(rows=first_is_nan))
    _, record = made.round(start(made))
    refused = [client for client in record["clients"] if "refused" in client]
    judged = [client for client in record["clients"] if "refused" not in client]
    assert len(refused) == 1
    assert "details" not in refused[0]
    assert [client["details"]["place"] for client in judged] == list(range(len(judged)))
    assert all(client["details"]["length"] > 0 for client in judged)
    _, plain = federation(Spy()).round(start(federation(Spy())))
    assert not any("details" in client for client in plain["clients"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.zeros(2), r"the defense's extra must be of shape \(6,\), got \(2,\)"),
        (torch.full((6,), torch.nan), "the defense's extra must not be NaN"),
    ],
)
def test_details_that_break_the_contract_are_told(
    federation: Make, values: Tensor, message: str
) -> None:
    @dataclass(frozen=True)
    class Wrong(Defense):
        def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
            outcome = mean_of(updates, torch.ones(len(updates), dtype=torch.bool))
            return replace(outcome, details={"extra": values}), state

    made = federation(Wrong())
    with pytest.raises(UserError, match=message):
        made.round(start(made))


def test_pretraining_that_diverges_is_told(federation: Make) -> None:
    deep = nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.ReLU(), nn.Linear(8, 10))
    made = federation(lr=1e30, pretrain_rounds=1, network=deep)
    with pytest.raises(UserError, match=r"lr=1e\+30: pretraining diverges"):
        made.pretrain(made.initial())


def test_a_defense_that_breaks_its_contract_is_told_so(federation: Make) -> None:
    @dataclass(frozen=True)
    class Short(Defense):
        def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Any, Any]:
            return Aggregate(updates[0][:-1], torch.ones(len(updates))), state

    made = federation(Short())
    with pytest.raises(UserError, match=r"update must be of shape \(7850,\)"):
        made.round(start(made))


def test_an_attack_that_sends_too_few_rows_is_told_so(federation: Make) -> None:
    made = federation(Spy(), Hostile(rows=lambda u: u[:1]))
    with pytest.raises(UserError, match="a row for each of 2 clients, got 1"):
        made.round(start(made))


class FarOff(nn.Module):
    """Moves its input off mean 0 and variance 1, so that batch norm has something to learn."""

    def forward(self, x: Tensor) -> Tensor:
        return 5 * x + 10


class TestBatchNorm:
    """Running statistics travel beside the parameters."""

    @staticmethod
    def network() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(784, 8), FarOff(), nn.BatchNorm1d(8), nn.Linear(8, 10)
        )

    def test_statistics_are_averaged_over_the_accepted_with_their_weights(
        self, federation: Make
    ) -> None:
        @dataclass(frozen=True)
        class Weighted(Defense):
            def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Any, Any]:
                weights = torch.tensor([0.75, 0.25, 0, 0, 0, 0])
                return Aggregate(weights @ updates, weights, weights > 0), state

        made = federation(Weighted(), network=self.network())
        begin = start(made)
        _, buffers = made.ranks.train(made._select(begin))
        end, _ = made.round(begin)
        assert buffers.shape == (6, 16)
        assert not torch.allclose(buffers[0], buffers[1])
        torch.testing.assert_close(end.buffers, 0.75 * buffers[0] + 0.25 * buffers[1])

    def test_nobody_accepted_keeps_the_statistics(self, federation: Make) -> None:
        @dataclass(frozen=True)
        class Nobody(Defense):
            def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Any, Any]:
                return mean_of(updates, torch.zeros(len(updates), dtype=torch.bool)), state

        made = federation(Nobody(), network=self.network())
        end, _ = made.round(start(made))
        assert torch.equal(end.buffers, start(made).buffers)

    def test_evaluation_uses_the_aggregated_statistics(self, federation: Make) -> None:
        """A model whose statistics matter: with the initial ones, its accuracy is another."""
        made = federation(Spy(), ATTACKS.build({"name": "none"}), self.network(), lr=0.2)
        state = start(made)
        for _ in range(5):
            state, record = made.round(state)
        without = made._evaluate(replace(state, buffers=start(made).buffers))[0]
        assert made._evaluate(state)[0] == record["MA"]
        assert record["MA"] > without + 0.05

    def test_a_single_left_over_sample_does_not_break_training(self, federation: Make) -> None:
        n_samples = len(federation().simulation.data.shards[0])
        made = federation(Spy(), network=self.network(), batch_size=n_samples - 1)
        made.round(start(made))


class TestSelection:
    def test_a_round_draws_its_clients_from_the_pool(self, federation: Make) -> None:
        simulation = federation(pool=20, n_clients=6, pmr=0.5).simulation
        rounds = [simulation.selection.select(index) for index in range(10)]
        for participants in rounds:
            ids = [p.client for p in participants]
            assert ids == sorted(set(ids))
            assert len(ids) == 6
            assert sum(p.malicious for p in participants) == 3
            assert {j.client for j in participants if j.malicious} <= set(
                simulation.selection.malicious
            )
        assert len({tuple(p.client for p in participants) for participants in rounds}) > 1
        assert len(simulation.selection.malicious) == 10

    def test_a_larger_pmr_adds_to_the_malicious_clients_of_a_smaller(
        self, federation: Make
    ) -> None:
        few, many = (
            set(federation(pmr=pmr).simulation.selection.malicious) for pmr in (0.34, 0.67)
        )
        assert few < many

    @pytest.mark.parametrize(("pmr", "n"), [(0, 0), (0.2, 6), (0.3, 9), (0.5, 15), (1, 30)])
    def test_the_number_of_malicious_clients_is_exact(
        self, federation: Make, pmr: float, n: int
    ) -> None:
        participants = federation(pmr=pmr, n_clients=30).simulation.selection.select(0)
        assert sum(p.malicious for p in participants) == n

    def test_pretraining_is_benign_and_draws_the_same_whatever_the_pmr(
        self, federation: Make
    ) -> None:
        few, many = (
            federation(pool=20, pmr=pmr).simulation.selection.select(-3) for pmr in (0.0, 0.5)
        )
        assert few == many
        assert not any(p.malicious for p in many)


def test_pretraining_is_plain_averaging(federation: Make) -> None:
    made = federation(Spy(), ATTACKS.build({"name": "none"}), pretrain_rounds=2)
    begin = made.initial()
    assert begin.next_round == -2
    updates, _ = made.ranks.train(made._select(begin))
    end = made.pretrain(begin)
    torch.testing.assert_close(end.params, begin.params + updates.mean(dim=0))
    assert end.next_round == -1
    assert torch.equal(end.initial_params, end.params)


def test_a_backdoor_takes_hold_without_a_defense_and_not_without_an_attack(
    after_rounds: Callable[..., Record],
) -> None:
    assert after_rounds(ATTACKS.build({"name": "constrain_and_scale"}))["BA"] > 0.8
    assert after_rounds(ATTACKS.build({"name": "none"}))["BA"] < 0.2


def test_models_are_measured_when_it_is_due(federation: Make) -> None:
    made = federation(rounds=5, evaluate_every=2)
    measured = made.ranks.evaluate
    asked: list[Tensor] = []

    def evaluate(params: Tensor, buffers: Tensor) -> list[float | None]:
        asked.append(params)
        return measured(params, buffers)

    made.ranks.evaluate = evaluate  # type: ignore[method-assign]
    state, records = replace(made.initial(), next_round=0), []
    for _ in range(5):
        state, record = made.round(state)
        records.append(record)
    due = [False, True, False, True, True]  # every second, and the last
    for key in ("MA", "BA"):
        assert [record[key] is not None for record in records] == due
    assert [record["BA_by_backdoor"]["0"] is not None for record in records] == due
    assert len(asked) == 3


def test_measuring_less_often_changes_no_model(federation: Make) -> None:
    ends = []
    for every in (1, 3):
        made = federation(rounds=3, evaluate_every=every)
        state = replace(made.initial(), next_round=0)
        for _ in range(3):
            state, record = made.round(state)
        ends.append((state.params, record["MA"], record["BA"]))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1:] == ends[1][1:]


@pytest.mark.parametrize("n_parts", [1, 2, 3, 7])
def test_parts_of_an_evaluation_add_up(federation: Make, n_parts: int) -> None:
    made = federation()
    simulation, start = made.simulation, made.initial()
    whole = simulation.evaluator.count_correct(start.params, start.buffers, 0, 1)
    parts = [
        simulation.evaluator.count_correct(start.params, start.buffers, i, n_parts)
        for i in range(n_parts)
    ]
    assert torch.equal(sum(parts), whole)
    assert whole.sum() > 0
