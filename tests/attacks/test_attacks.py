"""All attacks in the round loop: what they change, what they leave alone, what they see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end import (
    fedbench,
    fedbench_in_this_process,
    result,
    rounds,
    run_folders,
    summary,
)
from shipped import shipped
from torch import Tensor, nn
from untargeted import Spy

from fedbench.attack import ATTACKS, Attack, AttackView, Omniscient, Poisoning
from fedbench.errors import UserError
from fedbench.federation import Federation
from fedbench.metrics import stealth
from fedbench.ops import norms_and_cosines
from fedbench.results.checkpoint import Checkpoint

Make = Callable[..., Federation]
every_attack = pytest.mark.parametrize("name", shipped(ATTACKS))
ACTIVE = [name for name in shipped(ATTACKS) if ATTACKS.get(name).active]
OMNISCIENT = ["alie", "ipm", "min_max"]


def start(federation: Federation, index: int = 0) -> Checkpoint:
    return replace(federation.initial(), next_round=index)


def sent(made: Federation, index: int = 0) -> tuple[Tensor, Tensor]:
    """Honest and malicious updates of a round."""
    end, _ = made.round(start(made, index))
    malicious = torch.tensor([p.malicious for p in made.rank_context.selection.select(index)])
    return end.defense_state[~malicious], end.defense_state[malicious]


def of(name: str, **settings: Any) -> Attack:
    return ATTACKS.build({"name": name, **settings})


@pytest.mark.parametrize("name", ACTIVE)
@pytest.mark.parametrize("network", [None, "dropout"])
def test_an_attack_does_not_change_honest_updates(
    federation: Make, name: str, network: str | None
) -> None:
    def net() -> nn.Module | None:
        if network is None:
            return None
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.Dropout(), nn.Linear(8, 10))

    honest, poisoned = sent(federation(Spy(), of(name), net(), pmr=0.5))
    made = federation(Spy(), of("none"), net(), pmr=0.5)
    everyone = made.round(start(made))[0].defense_state
    malicious = torch.tensor(
        [
            p.client in made.rank_context.selection.malicious
            for p in made.rank_context.selection.select(0)
        ]
    )
    assert torch.equal(honest, everyone[~malicious])
    assert not torch.equal(poisoned, everyone[malicious])


@every_attack
def test_the_record_of_a_round_is_complete(federation: Make, name: str) -> None:
    made = federation(Spy(), of(name))
    for index in range(2):
        _, record = made.round(start(made, index))
        assert 0 <= record["MA"] <= 1
        targeted = bool(made.rank_context.data.backdoors)
        assert (record["BA"] is not None) == targeted == bool(record["BA_by_backdoor"])
        assert record["attacked"] == (name != "none")
        assert (record["norm_ratio"] is not None) == (name != "none")
        for client in record["clients"]:
            assert client["norm"] > 0
            assert -1 <= client["cosine"] <= 1


@every_attack
def test_the_same_seed_gives_the_same_updates(federation: Make, name: str) -> None:
    rows = [sent(federation(Spy(), of(name)))[name != "none"] for _ in range(2)]
    assert torch.equal(*rows)
    if name != "none":
        other = sent(federation(Spy(), of(name), seed=1))[1]
        assert not torch.equal(rows[0], other)


@pytest.mark.parametrize("name", ACTIVE)
@pytest.mark.parametrize("pmr", [0.17, 1.0], ids=["one", "all"])
def test_one_malicious_client_or_only_malicious_clients(
    federation: Make, name: str, pmr: float
) -> None:
    made = federation(Spy(), of(name), pmr=pmr)
    _, malicious = sent(made)
    assert len(malicious) == round(6 * pmr)
    assert malicious.isfinite().all()


@pytest.mark.parametrize("name", OMNISCIENT)
def test_omniscient_attacks_are_marked_and_can_be_restricted(name: str) -> None:
    attack = of(name)
    assert isinstance(attack, Omniscient)
    assert attack.omniscient
    assert not of(name, omniscient=False).omniscient  # type: ignore[attr-defined]
    others = [other for other in shipped(ATTACKS) if issubclass(ATTACKS.get(other), Omniscient)]
    assert others == OMNISCIENT


@dataclass(frozen=True)
class Curious(Attack):
    """Append to `seen` what each method receives."""

    seen: Any = None

    def poison(self, x: Tensor, y: Tensor, poisoning: Poisoning) -> tuple[Tensor, Tensor]:
        self.seen.append(("poison", len(y)))
        return x, y

    def objective(self, loss: Tensor, params: Sequence[Tensor], view: AttackView) -> Tensor:
        assert (view.benign, view.clean_update) == (None, None)
        return loss

    def craft(self, update: Tensor, view: AttackView) -> Tensor:
        self.seen.append(("craft", view.benign, view.clean_update))
        return update

    def collude(self, updates: Tensor, view: AttackView) -> Tensor:
        self.seen.append(("collude", updates, view.benign, view.n_clients, view.n_malicious))
        return updates


@dataclass(frozen=True)
class AllKnowing(Omniscient):
    seen: Any = None

    def collude(self, updates: Tensor, view: AttackView) -> Tensor:
        self.seen.append((view.benign, self.honest_updates(updates, view)))
        return updates


def test_an_attack_sees_only_its_own_clients(federation: Make) -> None:
    seen: list[Any] = []
    made = federation(Spy(), Curious(seen=seen))
    _, malicious = sent(made)
    shards = made.rank_context.data.shards
    clients = [p.client for p in made.rank_context.selection.select(0) if p.malicious]
    assert [size for kind, size, *_ in seen if kind == "poison"] == [
        len(shards[c]) for c in clients
    ]
    assert [item for item in seen if item[0] == "craft"] == [("craft", None, None)] * 2
    (_, updates, benign, n_clients, n_malicious) = seen[-1]
    assert torch.equal(updates, malicious)
    assert benign is None
    assert (n_clients, n_malicious) == (6, 2)


@pytest.mark.parametrize("omniscient", [True, False])
def test_omniscient_attacks_see_honest_updates(federation: Make, omniscient: bool) -> None:
    seen: list[Any] = []
    honest, malicious = sent(federation(Spy(), AllKnowing(omniscient=omniscient, seen=seen)))
    ((benign, known),) = seen
    assert torch.equal(known, honest if omniscient else malicious)
    assert (benign is not None) == omniscient


@pytest.mark.parametrize("name", OMNISCIENT)
def test_omniscient_attacks_skip_updates_that_are_not_finite(name: str) -> None:
    rng = torch.Generator().manual_seed(0)
    rows, own = torch.randn(7, 20, generator=rng), torch.randn(3, 20, generator=rng)
    broken = rows.clone()
    broken[2, 5], broken[4] = torch.nan, torch.inf
    view = AttackView(0, torch.zeros(20), {}, 10, 3, 1.0, torch.Generator())
    finite = replace(view, benign=rows[[0, 1, 3, 5, 6]])
    sent = [of(name).collude(own, v) for v in (replace(view, benign=broken), finite)]
    assert torch.equal(sent[0][0], sent[1][0])
    assert sent[0][0].isfinite().all()
    nobody = replace(view, benign=torch.full((7, 20), torch.nan))
    instead = of(name, omniscient=False).collude(own, view)
    assert torch.equal(of(name).collude(own, nobody)[0], instead[0])


def test_an_update_of_the_wrong_shape_is_an_error(federation: Make) -> None:
    @dataclass(frozen=True)
    class Short(Attack):
        def craft(self, update: Tensor, view: AttackView) -> Tensor:
            return update[:-1]

    with pytest.raises(UserError, match=r"craft must return .* \(7850,\), got .* \(7849,\)"):
        sent(federation(Spy(), Short()))


class TestStealth:
    def test_by_hand(self) -> None:
        # Honest (3, 4) and (0, 2), malicious (-6, -8): norms 5, 2, 10. Cosines: 8 / 10 between
        # (3, 4) and (0, 2); -66 / (10 sqrt(45)) between (-6, -8) and the honest sum (3, 6).
        updates = torch.tensor([[3.0, 4.0], [0.0, 2.0], [-6.0, -8.0]])
        norms, cosines = norms_and_cosines(updates, [0, 1])
        assert norms.tolist() == [5, 2, 10]
        assert cosines.tolist() == pytest.approx([0.8, 0.8, -66 / 10 / 45**0.5])
        clients = [
            {"malicious": i == 2, "norm": n, "cosine": c}
            for i, (n, c) in enumerate(zip(norms.tolist(), cosines.tolist(), strict=True))
        ]
        found = stealth(clients)
        assert found["norm_ratio"] == pytest.approx(10 / 3.5)
        assert found["cosine"] == pytest.approx(-66 / 10 / 45**0.5)
        assert found["benign_cosine"] == pytest.approx(0.8)

    def test_metrics_without_data_are_none(self) -> None:
        one = {"malicious": True, "norm": 2.0, "cosine": 0.5}
        assert stealth([one]) == {"norm_ratio": None, "cosine": 0.5, "benign_cosine": None}
        zero = {"malicious": False, "norm": 0.0, "cosine": 0.0}
        assert stealth([one, zero])["norm_ratio"] is None
        refused = {"malicious": True, "norm": None, "cosine": None}
        assert stealth([refused, zero])["cosine"] is None

    @pytest.mark.parametrize("seed", range(20))
    def test_against_the_definition(self, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        n, p = 4 + seed, 5 + 700 * (seed % 3)
        rows = torch.randperm(n, generator=rng)[: n - 2].tolist()
        updates = torch.randn(n, p, generator=rng) + (100 if seed % 2 else 0)
        norms, cosines = norms_and_cosines(updates, rows)
        exact = updates.double()
        for i in range(n):
            others = sum(exact[j] for j in rows if j != i)
            assert norms[i] == pytest.approx(float(exact[i].norm()), rel=1e-12)
            expected = exact[i] @ others / exact[i].norm() / others.norm()
            assert cosines[i] == pytest.approx(float(expected), abs=1e-9)

    def test_zero_rows_have_cosine_0(self) -> None:
        updates = torch.tensor([[0.0, 0.0], [1.0, 1.0], [-1.0, -1.0], [2.0, 0.0]])
        assert norms_and_cosines(updates, [1, 2])[1].tolist()[0] == 0
        assert norms_and_cosines(updates, [])[1].tolist() == [0] * 4
        assert norms_and_cosines(updates, [3])[1].tolist()[3] == 0  # no other honest row

    @pytest.mark.parametrize(("pmr", "own"), [(1.0, None), (0.84, None), (0.67, 1)])
    def test_a_client_without_honest_peers_has_no_cosine(
        self, federation: Make, pmr: float, own: int | None
    ) -> None:
        """Six malicious clients; five and one honest; four and two honest."""
        made = federation(Spy(), of("sign_flip"), pmr=pmr)
        _, record = made.round(start(made))
        for client in record["clients"]:
            compared = client["cosine"] is not None
            assert compared == (own is not None or (client["malicious"] and pmr < 1))
        assert (record["benign_cosine"] is None) == (own is None)
        assert (record["cosine"] is None) == (pmr == 1)

    def test_huge_rows_do_not_overflow(self) -> None:
        updates = torch.tensor([[3e38, 3e38], [1.0, 2.0], [1.0, 1.0]])
        norms, cosines = norms_and_cosines(updates, [1, 2])
        assert norms.isfinite().all()
        assert cosines.tolist()[0] == pytest.approx(5 / (2**0.5 * 13**0.5))

    def test_a_stronger_constraint_gives_shorter_updates(self, federation: Make) -> None:
        ratios = []
        for alpha in (1.0, 0.7, 0.4, 0.1):
            attack = of("constrain_and_scale", alpha=alpha, gamma=1)
            made = federation(Spy(), attack)
            ratios.append(made.round(start(made))[1]["norm_ratio"])
        assert ratios == sorted(ratios, reverse=True)
        assert ratios[-1] < 0.7 * ratios[0]

    def test_the_summary_is_the_mean_over_attacked_rounds(self, tmp_path: Path) -> None:
        command = ["attack=ipm", "pmr=0.34", "attack_rounds=[1,2]"]
        assert fedbench_in_this_process(*command, cwd=tmp_path).code == 0
        (folder,) = run_folders(tmp_path / "runs")
        ratios = [record["norm_ratio"] for record in rounds(folder)]
        assert ratios[0] is None
        assert summary(folder)["norm_ratio"] == pytest.approx((ratios[1] + ratios[2]) / 2)
        assert summary(folder)["cosine"] == pytest.approx(-1)
        assert summary(folder)["BA"] is None


@pytest.mark.slow
def test_two_processes_give_the_same_bits_as_one(tmp_path: Path) -> None:
    """Covers backdoors that need the model, clean updates, slots, and collusion."""
    command = ["-m", "attack=edge_case,dba,adaptive_baybfed,min_max", "pmr=0.5", "rounds=2"]
    one = ["executor.devices=1", "out=on1", "hydra/launcher=basic"]
    assert fedbench_in_this_process(*command, *one, cwd=tmp_path).code == 0
    assert fedbench(*command, "executor.devices=2", "out=on2", cwd=tmp_path).code == 0
    found = [
        {run.name: result(run) for run in run_folders(tmp_path / out)} for out in ("on1", "on2")
    ]
    assert len(found[0]) == 4
    assert found[0] == found[1]
