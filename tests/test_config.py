"""The configuration: every shipped file composes; the run id covers all that affects results."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

import fedbench
from fedbench import run_ids
from fedbench.config import RunConfig, register_schema
from fedbench.defense import DEFENSES
from fedbench.errors import UserError
from fedbench.multirun import sweeper
from fedbench.plan import Plan
from fedbench.plugin_configs import config_groups, options_of
from fedbench.run_ids import settings_without

ROOT = Path(fedbench.__file__).parent.parent
GROUPS = ("defense", "attack", "dataset", "model", "executor", "tracker")
FILES = [(path.parent.name, path.stem) for path in sorted((ROOT / "conf").glob("*/*.yaml"))]
TUNED_GROUPS = {"tuned": "defense", "tuned_attack": "attack"}
CHOICES = [(group, choice) for group, choice in FILES if group in GROUPS]
SCENARIOS = [choice for group, choice in FILES if group == "scenario"]
TUNED = [(group, choice) for group, choice in FILES if group in TUNED_GROUPS]
SIZES = [choice for group, choice in FILES if group == "size" and choice != "default"]
SIZED = [choice for group, choice in FILES if group == "sized"]
SWEEPS = sorted((ROOT / "sweeps").glob("*.yaml"))
SWEEPS += sorted(
    path for part in ("paper", "beyond") for path in (ROOT / "sweeps" / part).glob("*")
)
SWEEPS = [path for path in SWEEPS if path.suffix == ".yaml" and path.stem != "cifar10_model"]
VARIANTS = {"baybfed_literal": "baybfed"}  # file -> plugin with other settings
SIZED_SWEEPS = [
    (path, size)
    for path in SWEEPS
    for size in (["default"] if path.parent.name == "sweeps" else SIZES)
]


@pytest.fixture(autouse=True)
def hydra() -> Iterator[None]:
    register_schema()
    with initialize_config_module("fedbench.conf", version_base="1.3"):
        yield
    GlobalHydra.instance().clear()


def config(*overrides: str) -> RunConfig:
    return RunConfig.from_hydra(compose("config", overrides=list(overrides)))


@pytest.mark.parametrize(("group", "choice"), CHOICES, ids=map("/".join, CHOICES))
def test_every_file_of_conf_composes_and_builds(group: str, choice: str) -> None:
    needed = {
        "model/custom": ["model.target=torch.nn.Flatten"],
        "model/lstm": ["dataset=reddit_sample"],
        "model/gru": ["dataset=iot_sample"],
        "dataset/custom": ["dataset.source=."],
    }
    composed = config(f"{group}={choice}", *needed.get(f"{group}/{choice}", []))
    assert getattr(composed, group)["name"] == VARIANTS.get(choice, choice)
    Plan.of(composed)


@pytest.mark.parametrize(("choice", "name"), VARIANTS.items())
def test_a_variant_changes_settings_of_its_plugin(choice: str, name: str) -> None:
    variant, plain = config(f"defense={choice}").defense, config(f"defense={name}").defense
    assert variant != plain
    assert variant.keys() == plain.keys()


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "tuned"), TUNED, ids=map("/".join, TUNED))
def test_tuned_settings_apply_to_their_data_set_and_the_command_line_wins(
    folder: str, tuned: str
) -> None:
    kind = TUNED_GROUPS[folder]
    names = [choice for group, choice in CHOICES if group == kind]
    name = next(name for name in names if tuned.endswith(f"_{name}"))
    data = f"dataset={tuned.removesuffix(f'_{name}')}"
    values = yaml.safe_load((ROOT / "conf" / folder / f"{tuned}.yaml").read_text())
    whole = config(data, f"{kind}={name}")
    plain, there = getattr(config(f"{kind}={name}"), kind), getattr(whole, kind)
    assert there == plain | values
    assert there.keys() == plain.keys()
    Plan.of(whole)
    for key, value in values.items():
        assert value != plain[key]
        chosen = config(data, f"{kind}={name}", f"{kind}.{key}=0.5")
        assert getattr(chosen, kind)[key] == 0.5
    other = next(other for other in names if other != name)
    assert getattr(config(data, f"{kind}={other}"), kind) == getattr(
        config(f"{kind}={other}"), kind
    )


def test_every_group_has_a_folder() -> None:
    others = {"scenario", "size", "sized"}
    assert {group for group, _ in FILES} == {*GROUPS, *TUNED_GROUPS, *others}


@pytest.mark.slow
@pytest.mark.parametrize(("path", "size"), SIZED_SWEEPS, ids=lambda value: Path(value).stem)
def test_every_sweep_composes(path: Path, size: str) -> None:
    sized = [f"size={size}"]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(path.parent), version_base="1.3"):
        found = ["hydra.searchpath=[pkg://fedbench.conf]", *sized]
        sweep = compose(path.stem, overrides=found, return_hydra_config=True)
        assert sweep.hydra.mode.name == "MULTIRUN"
        assert sweep.name == path.stem
        loader = GlobalHydra.instance().config_loader()
        overrides = sweeper.parsed(sweep.hydra.sweeper.params, sized, loader)
        options = {group: options_of(group) for group in config_groups()}

        def choices(run: Sequence[str]) -> Mapping[str, str]:
            composed = compose(path.stem, [found[0], *run], return_hydra_config=True)
            return composed.hydra.runtime.choices

        runs = sweeper.expand(overrides, options, choices)
        assert len(runs) > 1
        # The size changes little but the data sets, and composing takes long.
        for run in one_of_each(runs) if size != "paper" else (runs[0], runs[-1]):
            composed = compose(path.stem, overrides=[found[0], *run])
            RunConfig.from_hydra(composed)


def one_of_each(runs: list[list[str]]) -> Iterator[list[str]]:
    """The runs of a sweep that have an override which no earlier one had, seeds aside."""
    seen: set[str] = set()
    for run in runs:
        new = {override for override in run if not override.startswith("seed=")} - seen
        if new:
            seen |= new
            yield run


def test_a_size_applies_to_its_data_sets_and_the_command_line_wins() -> None:
    for sized in SIZED:
        size, _, dataset = sized.partition("_")
        assert size in SIZES
        values = yaml.safe_load((ROOT / "conf" / "sized" / f"{sized}.yaml").read_text())
        plain, there = config(f"dataset={dataset}"), config(f"dataset={dataset}", f"size={size}")
        executor = {**plain.executor, **values.pop("executor", {})}
        assert there == replace(plain, **values, executor=executor)
        assert config(f"dataset={dataset}", f"size={size}", "rounds=7").rounds == 7
    assert config("size=laptop", "dataset=fmnist_sample") == config("dataset=fmnist_sample")


def test_lr_falls_by_a_factor_after_every_round_benign_ones_before_round_0_included() -> None:
    after = RunConfig(lr_decay=0.5, pretrain_rounds=3)
    # Round -3 is the first one that trains.
    assert [after.lr_scale_in(index) for index in (-3, -2, 0, 2)] == [1, 0.5, 0.125, 0.03125]
    started = RunConfig(lr_decay=0.5, pretrain_rounds=3, pretrained="model.pt")
    assert started.lr_scale_in(0) == 1
    assert RunConfig().lr_scale_in(1000) == 1


def test_a_constant_learning_rate_leaves_the_run_id_as_it_was() -> None:
    assert "lr_decay" not in settings_without(RunConfig(), ())
    defense = {"name": "krum"}
    falling, constant = (RunConfig(defense=defense, lr_decay=decay) for decay in (0.9, 1.0))
    assert run_ids.run_id(falling, {}) != run_ids.run_id(constant, {})


def test_schema_and_config_yaml_have_the_same_defaults() -> None:
    composed = OmegaConf.to_container(compose("config"))
    assert isinstance(composed, dict)
    for key, value in composed.items():
        if key not in GROUPS:
            assert getattr(RunConfig, str(key)) == value, key


def test_a_data_set_brings_its_model_and_the_command_line_wins() -> None:
    assert config("dataset=mnist").model["name"] == "cnn"
    assert config("dataset=fmnist").model["name"] == "mlp"
    assert config("dataset=mnist", "model=mlp").model["name"] == "mlp"
    assert config("model=mlp", "dataset=mnist").model["name"] == "mlp"


@pytest.mark.parametrize("dataset", ["fmnist_sample", "reddit_sample"])  # reddit_sample sets rounds
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_scenario_overrides_the_data_set_and_the_command_line_overrides_both(
    scenario: str, dataset: str
) -> None:
    values = yaml.safe_load((ROOT / "conf" / "scenario" / f"{scenario}.yaml").read_text()) or {}
    both = [f"scenario={scenario}", f"dataset={dataset}"]
    there = config(*both)
    assert there == replace(config(f"dataset={dataset}"), **values)
    Plan.of(there)
    assert config(*both, "rounds=7") == replace(there, rounds=7)


def test_the_default_scenario_changes_nothing_and_converged_follows_the_paper() -> None:
    assert config("scenario=default") == config()
    paper = config("scenario=converged", "dataset=reddit_sample")
    assert (paper.pretrain_non_iid, paper.pretrain_rounds, paper.rounds) == (0, 40, 5)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("pmr", v) for v in (-0.1, 1.5, float("nan"))],
        *[("pdr", v) for v in (-1.0, 1.01)],
        *[(key, v) for v in (-0.5, 2.0) for key in ("non_iid", "pretrain_non_iid")],
        *[(k, 0) for k in ("n_clients", "rounds", "local_epochs", "batch_size")],
        *[(k, -1) for k in ("pretrain_rounds", "attack_start", "seed", "momentum")],
        *[(k, 0.0) for k in ("lr", "lr_decay", "server_lr", "dirichlet_alpha")],
        ("lr_decay", 1.01),
        *[("lr", float("inf")), ("weight_decay", float("nan")), ("weight_decay", -1.0)],
        *[("pool", 29), ("partition", "by_size")],
        *[("name", v) for v in ("", ".", "..", "a/b", ".hidden")],
    ],
)
def test_a_value_out_of_range_is_a_user_error(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"{key}={value}: must be "):
        replace(RunConfig(), **{key: value}).check()


@pytest.mark.parametrize(
    "value",
    [
        *("abc", 2.5, 30.0, True, None, -1, 0),
        *([], [40], [90, 40], [0, 5], [4, 5, 6], [1.5, 3], [True, 5], [None, 5], ["a", "b"]),
    ],
    ids=str,
)
def test_n_clients_must_be_a_number_or_a_range(value: Any) -> None:
    with pytest.raises(UserError) as caught:
        RunConfig(n_clients=value).check()
    shown = value if isinstance(value, str) else json.dumps(value)
    assert str(caught.value) == (
        f"n_clients={shown}: must be a whole number from 1 to 10000 or a range [fewest, most]"
    )


@pytest.mark.parametrize("override", ["true", "null", "[]", "{a:1}", "2.5"])
def test_other_types_of_n_clients_are_user_errors_despite_its_type_any(override: str) -> None:
    with pytest.raises(UserError, match=r"^n_clients=.*: must be a whole number"):
        config(f"n_clients={override}")


@pytest.mark.parametrize(
    ("value", "fewest", "most"),
    [("[40,90]", 40, 90), ("[30,30]", 30, 30), ("[1,2]", 1, 2), ("7", 7, 7), ("'7'", 7, 7)],
)
def test_n_clients_as_a_number_or_a_range(value: str, fewest: int, most: int) -> None:
    made = config(f"n_clients={value}")
    assert (made.fewest_clients, made.most_clients, made.pool_size) == (fewest, most, most)
    assert [*made.client_counts] == [*range(fewest, most + 1)]
    assert config(f"n_clients={value}", f"pool={most}").pool_size == most
    with pytest.raises(UserError, match=rf"pool={most - 1}: must be at least {most}, because n_c"):
        config(f"n_clients={value}", f"pool={most - 1}")


def test_a_number_of_clients_is_drawn_in_every_round_by_seed_and_round_only() -> None:
    rounds = range(-20, 980)
    made = config("n_clients=[40,44]")
    drawn = [made.n_clients_in(index) for index in rounds]
    counts = Counter(drawn)
    assert {*counts} == {40, 41, 42, 43, 44}
    assert all(150 < n < 250 for n in counts.values())  # uniform: 200 each, standard deviation 13
    assert len({*drawn[:20]}) > 1  # in benign rounds as well
    others = ["defense=krum", "attack=none", "pmr=0.5", "pool=99", "executor.devices=2", "rounds=3"]
    same = config("n_clients=[40,44]", *others)
    assert [same.n_clients_in(index) for index in reversed(rounds)] == drawn[::-1]
    other_seed = config("n_clients=[40,44]", "seed=1")
    assert [other_seed.n_clients_in(index) for index in rounds] != drawn
    assert {*map(config().n_clients_in, rounds)} == {30}


def test_a_defense_is_checked_for_every_number_of_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"krum: krum needs N - f - 2 >= 1, got N=2, f=0"):
        Plan.of(config("n_clients=[2,9]", "defense=krum", "pmr=0.5"))
    with pytest.raises(UserError, match=r"krum needs m <= N, got N=4, m=5"):
        Plan.of(config("n_clients=[4,9]", "defense=krum", "defense.m=5"))
    Plan.of(config("n_clients=[5,9]", "defense=krum", "defense.m=5"))

    def check(self: object, n: int) -> None:
        if n == 7:
            raise ValueError(f"not for N={n}")

    monkeypatch.setattr(DEFENSES.get("krum"), "check", check)
    with pytest.raises(UserError, match="defense krum: not for N=7"):
        Plan.of(config("n_clients=[5,9]", "defense=krum"))
    Plan.of(config("n_clients=[8,9]", "defense=krum"))


def test_a_defense_warns_if_any_number_of_clients_is_too_small() -> None:
    krum = ["defense=krum", "defense.f=3"]
    warning = Plan.of(config("n_clients=[7,20]", *krum)).warning()
    assert warning == "krum is proven for N > 2f + 2 only, got N=7, f=3"
    assert Plan.of(config("n_clients=8", *krum)).warning() is not None
    assert Plan.of(config("n_clients=[9,20]", *krum)).warning() is None


def run_id(*overrides: str) -> str:
    return Plan.of(config(*overrides)).folder.path.name


def pretrain_id(*overrides: str) -> str:
    return Plan.of(config(*overrides)).pretrain_id


@pytest.mark.parametrize(
    "override",
    [
        *("defense=krum", "attack=none", "attack.alpha=0.5", "attack.gamma=3", "dataset=fmnist"),
        *("model=cnn", "model.hidden=[10]", "pmr=0.3", "pdr=0.4", "n_clients=29", "pool=31"),
        *("partition=dirichlet", "non_iid=0.4", "dirichlet_alpha=1", "pretrain_rounds=1"),
        *("rounds=11", "attack_start=1", "local_epochs=1", "batch_size=32", "lr=0.01"),
        *("momentum=0", "weight_decay=0.1", "server_lr=0.5", "seed=1"),
        *("executor.threads=2", "executor.precision=bf16-mixed"),
        *("attack.backdoors=[{name:patch,target:3}]", "attack_rounds=[1]", "malicious=sampled"),
        *("pdr_step=0.1", "attack.lr_decay=0.5", "attack=ipm", "attack=dba"),
        *("n_clients=[29,30]", "pretrain_non_iid=0", "pretrain_non_iid=1"),
    ],
)
def test_settings_that_affect_results_change_the_run_id(override: str) -> None:
    assert run_id(override) != run_id()


@pytest.mark.parametrize(
    "override",
    [
        *("out=elsewhere", "name=other", "tracker=none", "executor.devices=2", "pool=30"),
        *("n_clients=[30,30]", "pretrain_non_iid=0.5", "scenario=default", "rerun=true"),
    ],
)
def test_settings_that_do_not_affect_results_keep_the_run_id(override: str) -> None:
    assert run_id(override) == run_id()


@pytest.mark.parametrize(
    "where", ["pretrain_rounds=0", "dataset=reddit_sample", "dataset=iot_sample"]
)
def test_pretrain_non_iid_has_no_effect_without_pretraining_by_class(where: str) -> None:
    made = config(where, "pretrain_non_iid=1")
    assert made.pretraining.split == made.split
    assert run_id(where, "pretrain_non_iid=1") == run_id(where)
    assert pretrain_id(where, "pretrain_non_iid=1") == pretrain_id(where)


def test_a_new_setting_keeps_the_ids_of_runs_that_do_not_use_it() -> None:
    """Otherwise finished runs, and pretrained models that took hours, would be computed again."""
    assert "pretrain_non_iid" not in settings_without(config(), ())
    assert settings_without(config(), ())["n_clients"] == 30
    assert settings_without(config("pretrain_non_iid=0"), ())["pretrain_non_iid"] == 0


def test_a_pmr_that_rounds_to_no_client_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"pmr=0.01: rounds to no malicious client of n_clients=30"):
        Plan.of(config("pmr=0.01"))
    Plan.of(config("pmr=0.01", "attack=none"))
    Plan.of(config("pmr=0"))
    fewest = r"pmr=0.2: rounds to no malicious client of 2, the fewest of n_clients=\[2, 50\]"
    with pytest.raises(UserError, match=fewest):
        Plan.of(config("pmr=0.2", "n_clients=[2,50]"))
    Plan.of(config("pmr=0.2", "n_clients=[3,50]"))
    Plan.of(config("pmr=0.2", "n_clients=[2,50]", "malicious=sampled"))


@pytest.mark.parametrize("kind", ["defense", "attack", "backdoor"])
def test_a_new_version_of_a_plugin_changes_the_run_id(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, plan = run_id(), Plan.of(config())
    plugin = plan.backdoors[0] if kind == "backdoor" else getattr(plan, kind)
    monkeypatch.setattr(type(plugin), "version", 2)
    assert run_id() != before


def test_an_attack_that_never_starts_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"attack_start=10: must be below rounds=10"):
        Plan.of(config("attack_start=10"))
    Plan.of(config("attack_start=9"))
    Plan.of(config("attack_start=10", "attack=none"))


def test_omniscience_is_recorded_even_if_the_config_omits_it() -> None:
    plan = Plan.of(config("attack=alie", "~attack.omniscient"))
    assert plan.config.attack["omniscient"] is True
    assert plan.folder.path.name == run_id("attack=alie")
    assert "omniscient" not in Plan.of(config("attack=dba")).config.attack


@pytest.mark.parametrize(
    "override",
    [
        *("attack.gamma=" + "9" * 400, "attack=edge_case attack.eps=" + "9" * 400),
        *("attack=alie attack.z=" + "9" * 400, "attack.backdoors=[{name:patch,1:2}]"),
    ],
    ids=["gamma", "eps", "z", "key"],
)
def test_huge_numbers_and_numeric_keys_are_user_errors(override: str) -> None:
    with pytest.raises(UserError, match=r"must be a whole number from|has no setting 1"):
        Plan.of(config(*override.split()))


def test_a_pmr_that_rounds_to_no_client_of_the_pool_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"pmr=0.01: rounds to no malicious client of pool=40"):
        Plan.of(config("pmr=0.01", "malicious=sampled", "pool=40"))
    Plan.of(config("pmr=0.03", "malicious=sampled", "pool=40"))  # 1 client of 40


@pytest.mark.parametrize("dataset", ["fmnist_sample", "fmnist", "mnist", "cifar10"])
@pytest.mark.parametrize("attack", [name for group, name in CHOICES if group == "attack"])
def test_every_attack_fits_every_image_data_set(attack: str, dataset: str) -> None:
    Plan.of(config(f"attack={attack}", f"dataset={dataset}"))


def test_runs_that_differ_after_round_0_only_share_their_pretraining() -> None:
    base = pretrain_id()
    for same in (
        *("defense=krum", "attack=none", "attack=dba", "pmr=0.5", "malicious=sampled", "rounds=3"),
        *("pdr=0.1", "pdr_step=0.1", "attack_start=2", "attack_rounds=[3]"),
    ):
        assert pretrain_id(same) == base, same
    for other in (
        "seed=1",
        "lr=0.1",
        "non_iid=0",
        "n_clients=10",
        "n_clients=[10,30]",
        "pretrain_non_iid=0",
        "pretrain_rounds=2",
        "model=cnn",
    ):
        assert pretrain_id(other) != base, other


def test_runs_with_the_same_benign_rounds_share_their_pretraining() -> None:
    """The partition from round 0 on does not matter."""
    base = pretrain_id("non_iid=0")
    for same in (
        *("non_iid=0", "non_iid=0.7", "non_iid=1", "non_iid=0 dirichlet_alpha=2"),
        *("partition=dirichlet", "partition=dirichlet dirichlet_alpha=2", "n_clients=[30,30]"),
    ):
        assert pretrain_id("pretrain_non_iid=0", *same.split()) == base, same
    assert pretrain_id("non_iid=0", "dirichlet_alpha=2") == base
    for other in ("", "pretrain_non_iid=0.1", "partition=dirichlet", "pretrain_non_iid=0 seed=1"):
        assert pretrain_id(*other.split()) != base, other
    dirichlet = pretrain_id("partition=dirichlet")
    assert pretrain_id("partition=dirichlet", "non_iid=0") == dirichlet
    assert pretrain_id("partition=dirichlet", "dirichlet_alpha=2") != dirichlet


def test_gradients_are_clipped_where_training_would_diverge() -> None:
    """Few clients of one class each; docs have numbers of 30 such clients without clipping."""
    assert config().clip_grad is None
    assert config("non_iid=1").clip_grad is None
    assert config("non_iid=1", "n_clients=19").clip_grad == 1
    assert config("non_iid=1", "n_clients=[3,8]").clip_grad == 1
    assert config("non_iid=1", "n_clients=5", "pool=20").clip_grad is None
    assert config("non_iid=0.98", "n_clients=5").clip_grad is None
    assert config("non_iid=1", "n_clients=5", "partition=dirichlet").clip_grad is None
    assert config("non_iid=1", "n_clients=5", "clip_grad=null").clip_grad is None
    assert config("non_iid=1", "n_clients=5", "pretrain_non_iid=0").clip_grad is None
    assert config("non_iid=0", "n_clients=5", "pretrain_non_iid=1").clip_grad == 1
    assert config("clip_grad=3").clip_grad == 3
    assert run_id("clip_grad=null") == run_id("clip_grad=auto")
    for wrong in ("abc", "0", "-1", "true", "[1]"):
        with pytest.raises(UserError, match=r"^clip_grad=.+: must be above 0 and finite, null or"):
            config(f"clip_grad={wrong}")
    for wrong in ("inf", "nan"):
        with pytest.raises(UserError, match=rf"^clip_grad={wrong}: must be a finite number"):
            config(f"clip_grad={wrong}")
