"""run: complete runs in this process; shared and given models, resuming, error messages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedbench.config import RunConfig
from fedbench.data import DATASETS, Dataset
from fedbench.defense import DEFENSES, Aggregate, Defense, ServerView, mean_of
from fedbench.errors import UserError
from fedbench.federation import Federation
from fedbench.plan import Plan
from fedbench.results.checkpoint import Checkpoint
from fedbench.single_run import run

# Below 8 channels, torch 2.13 corrupts memory in the backward pass of strided convolutions on
# processors with AVX2 and no AVX-512.
WIDTHS = [8, 8]


@pytest.fixture
def small_data(monkeypatch: pytest.MonkeyPatch, sample: Dataset) -> None:
    """Make `fmnist_sample` 600 training and 300 test images."""
    monkeypatch.setattr(DATASETS.get("fmnist_sample"), "load", lambda source: sample)


@pytest.fixture
def counting_defense(monkeypatch: pytest.MonkeyPatch) -> str:
    """Register a defense that counts rounds in its state; return its name."""

    @dataclass(frozen=True)
    class CountingDefense(Defense):
        def init(self) -> Any:
            return {"rounds": 0}

        def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
            everyone = torch.ones(len(updates), dtype=torch.bool)
            return mean_of(updates, everyone), {"rounds": state["rounds"] + 1}

    monkeypatch.setitem(DEFENSES._classes, "counting", CountingDefense)
    return "counting"


def config(out: Path, defense: str | dict[str, Any] = "fedavg", **settings: Any) -> RunConfig:
    return RunConfig(
        **{
            "defense": {"name": defense} if isinstance(defense, str) else defense,
            "attack": {"name": "constrain_and_scale"},
            "dataset": {"name": "fmnist_sample"},
            "model": {"name": "mlp", "hidden": [4]},
            "executor": {"name": "sequential"},
            "tracker": {"name": "none"},
            "n_clients": 5,
            "rounds": 2,
            "pretrain_rounds": 1,
            "local_epochs": 1,
            "out": str(out),
        }
        | settings
    )


def test_runs_share_pretraining_but_no_state(tmp_path: Path, counting_defense: str) -> None:
    for first, second in (("fedavg", counting_defense), (counting_defense, "fedavg")):
        out = tmp_path / first
        run(config(out, first))
        (shared,) = (out / ".pretrained").glob("*.pt")
        written = shared.stat().st_mtime_ns
        assert run(config(out, second))["status"] == "finished"
        assert shared.stat().st_mtime_ns == written
        state = torch.load(
            Plan.of(config(out, counting_defense)).folder.checkpoint_file, weights_only=True
        )
        assert state["defense_state"] == {"rounds": 2}


def test_cached_pretraining_gives_the_same_results(tmp_path: Path) -> None:
    alone = run(config(tmp_path / "alone", "median"))
    run(config(tmp_path / "after", "krum"))
    after = run(config(tmp_path / "after", "median"))
    for key in ("MA", "BA"):
        assert alone[key] == after[key]


def test_diverged_pretraining_is_not_cached(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"^lr=1e\+30: pretraining diverges; set clip_grad=1 or a sm"
    ):
        run(config(tmp_path, lr=1e30))
    assert list((tmp_path / ".pretrained").glob("*.pt")) == []
    assert Plan.of(config(tmp_path, lr=1e30)).folder.finished() is None


def test_few_clients_of_one_class_each_can_be_pretrained(tmp_path: Path) -> None:
    default = {"non_iid": 1.0, "n_clients": 3, "pmr": 0.4, "pretrain_rounds": 20, "local_epochs": 2}
    network = {"model": {"name": "mlp"}}
    summary = run(config(tmp_path, rounds=1, **default, **network))
    assert summary["MA"] > 0.2  # of 0.3, as only 3 of 10 classes have a client
    with pytest.raises(UserError, match="diverges"):
        run(config(tmp_path, rounds=1, clip_grad=None, **default, **network))


@pytest.mark.usefixtures("small_data")
def test_given_model_replaces_pretraining(tmp_path: Path) -> None:
    """Starting from the file of 3 benign rounds equals pretraining for 3 rounds."""
    model = {"name": "resnet18_light", "widths": WIDTHS}  # with buffers
    before = run(config(tmp_path / "before", model=model, pretrain_rounds=3))
    (file,) = (tmp_path / "before" / ".pretrained").glob("*.pt")
    given = config(tmp_path / "given", model=model, pretrained=str(file), pretrain_rounds=9)
    after = run(given)
    assert (after["MA"], after["BA"]) == (before["MA"], before["BA"])
    assert not (tmp_path / "given" / ".pretrained").exists()
    # A run's checkpoint works, too: it holds the model after the last round.
    last = Plan.of(given).folder.checkpoint_file
    continued = config(tmp_path / "continued", model=model, pretrained=str(last), rounds=1)
    run(continued)
    start, end = (
        torch.load(path, weights_only=True)
        for path in (last, Plan.of(continued).folder.checkpoint_file)
    )
    assert torch.equal(end["initial_params"], start["params"])
    assert torch.equal(end["initial_buffers"], start["buffers"])
    assert not torch.equal(end["params"], start["params"])


def test_a_folder_with_one_finished_run_names_its_model(tmp_path: Path) -> None:
    first = config(tmp_path, name="model")
    run(first)
    checkpoint = Plan.of(first).folder.checkpoint_file
    folders = [checkpoint, checkpoint.parent, checkpoint.parent.parent]
    plans = [Plan.of(config(tmp_path, name="next", pretrained=str(path))) for path in folders]
    assert [plan.pretrained for plan in plans] == [checkpoint] * 3
    assert len({plan.folder.path for plan in plans}) == 1
    assert run(plans[2].config)["status"] == "finished"

    message = r"model: must hold one finished run, holds 2; or name the checkpoint\.pt of a run"
    run(config(tmp_path, name="model", seed=1))
    with pytest.raises(UserError, match=message):
        Plan.of(config(tmp_path, pretrained=str(tmp_path / "model")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty: must hold one finished run, holds 0"):
        Plan.of(config(tmp_path, pretrained=str(tmp_path / "empty")))


def test_run_id_depends_on_the_content_of_a_given_model(tmp_path: Path) -> None:
    run(config(tmp_path))
    run(config(tmp_path, seed=1))
    one, other = (tmp_path / ".pretrained").glob("*.pt")
    copy = tmp_path / "copy.pt"
    copy.write_bytes(one.read_bytes())
    ids = [Plan.of(config(tmp_path, pretrained=str(f))).folder.path for f in (one, copy, other)]
    assert ids[0] == ids[1] != ids[2]
    assert Plan.of(config(tmp_path)).folder.path not in ids


def test_unusable_given_models_are_user_errors(tmp_path: Path) -> None:
    run(config(tmp_path))
    (file,) = (tmp_path / ".pretrained").glob("*.pt")
    with pytest.raises(UserError) as caught:
        run(config(tmp_path, pretrained=str(file), model={"name": "mlp", "hidden": [5]}))
    assert str(caught.value) == (
        f"pretrained={file}: its model has 3,190 parameters, this run's has 3,985"
    )
    with pytest.raises(UserError, match=r"nowhere\.pt: cannot be read \(No such file"):
        Plan.of(config(tmp_path, pretrained=str(tmp_path / "nowhere.pt")))
    file.write_bytes(b"no model")
    with pytest.raises(UserError, match=f"pretrained={file}: not a fedbench checkpoint"):
        run(config(tmp_path, pretrained=str(file)))


@pytest.mark.usefixtures("small_data")
def test_batch_norm_resumes_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run interrupted after two rounds ends with the same running statistics as without."""
    model = {"name": "resnet18_light", "widths": WIDTHS}
    settings = {"model": model, "rounds": 4, "n_clients": [3, 5]}  # rounds of 4, 5, 3 and 4 clients
    whole = config(tmp_path / "whole", **settings)
    run(whole)
    stopped = config(tmp_path / "stopped", **settings)
    round_, done = Federation.round, []

    def interrupted(self: Federation, start: Checkpoint) -> Any:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(start.next_round)
        return round_(self, start)

    with monkeypatch.context() as patched:
        patched.setattr(Federation, "round", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(stopped)
    run(stopped)
    assert done == [0, 1]
    states = [
        torch.load(Plan.of(c).folder.checkpoint_file, weights_only=True) for c in (whole, stopped)
    ]
    assert torch.equal(states[0]["params"], states[1]["params"])
    assert torch.equal(states[0]["buffers"], states[1]["buffers"])
    assert states[0]["buffers"].ne(states[0]["initial_buffers"]).any()
    records = [Plan.of(c).folder.rounds() for c in (whole, stopped)]
    assert [[(r["MA"], r["BA"], len(r["clients"])) for r in run] for run in records[:1]] == [
        [(r["MA"], r["BA"], n) for r, n in zip(records[1], (4, 5, 3, 4), strict=True)]
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"partition": "natural"}, "partition=natural: the samples of fmnist_sample have no owne"),
        (
            {"model": {"name": "lstm"}},
            "model lstm: needs sequences labeled with the next symbol, but fmnist_sample has",
        ),
        ({"dataset": {"name": "iot_sample"}}, "partition=main_class: splits samples by label"),
        (
            {"dataset": {"name": "reddit_sample"}, "partition": "natural"},
            "model mlp: needs images or feature vectors, but reddit_sample has sequences",
        ),
    ],
)
def test_incompatible_plugins_are_user_errors_before_loading_data(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        Plan.of(config(tmp_path, **settings))
    assert str(caught.value).startswith(message)


def test_run_prints_the_defenses_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(config(tmp_path, defense={"name": "krum", "f": 2}))
    assert "warning: krum is proven for N > 2f + 2 only, got N=5, f=2\n" in capsys.readouterr().out
    run(config(tmp_path, defense={"name": "krum", "f": 1}))
    assert "warning" not in capsys.readouterr().out
