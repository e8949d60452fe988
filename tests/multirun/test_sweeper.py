"""Sweeps expand as by Hydra's basic sweeper, plus settings of one plugin alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest
from hydra import initialize_config_module
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from fedbench.errors import UserError
from fedbench.multirun.sweeper import expand

OPTIONS = {"defense": ["krum", "flame", "dp"], "attack": ["alie", "ipm"], "model": ["mlp", "gru"]}


@pytest.fixture(autouse=True)
def hydra() -> Iterator[None]:
    with initialize_config_module("fedbench.conf", version_base="1.3"):
        yield
    GlobalHydra.instance().clear()


def parsed(*overrides: str) -> list[Override]:
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    return parser.parse_overrides(list(overrides))


def choices(run: Sequence[str]) -> Mapping[str, str]:
    """As Hydra would compose: defaults, then the run; dataset=iot_sample chooses its own model."""
    chosen = {"defense": "krum", "attack": "alie", "model": "mlp"}
    if "dataset=iot_sample" in run:
        chosen["model"] = "gru"
    return chosen | dict(override.split("=", 1) for override in run)


def runs(*overrides: str) -> list[str]:
    return [" ".join(run) for run in expand(parsed(*overrides), OPTIONS, choices)]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["pmr=0.2"],
        ["pmr=0.2,0.3"],
        ["seed=0,1,2", "pmr=0.2,0.3", "name=x", "defense=krum,median"],
        ["seed=0,1", "pmr=0.2", "seed=2,3"],  # the last one counts, in the place of the first
        ["seed=range(0,3)", "lr=range(0.1,0.5,step=0.2)"],
        ["pmr=choice(0.2,0.3)", "seed=sort(3,1,2)", "rounds=tag(a,choice(1,2))"],
        ["defense=glob(*)", "attack=glob([a*,d*],exclude=dba)"],
        ["name='a,b','c=d'", 'out="with space",plain', r"name=a\,b,c"],
        ["name=null,true,1e-3,07,''"],
        ["n_clients=[4,9],[9,12]", "attack.backdoors=[{name:patch,size:3}],[]"],
        ["+defense.f=1,2", "++defense.m=3,4", "~attack.omniscient", "~tracker"],
        ["defense@other=krum,median"],
        ["name=${defense.name}-${seed}", "seed=0,1"],
        ["name="],
        ["model.arguments.width=1,2", "dataset.arguments.a.b=3"],  # no name of a plugin
    ],
    ids=" ".join,
)
def test_a_sweep_is_expanded_as_by_hydra(overrides: list[str]) -> None:
    """If this fails, Hydra's sweeper has changed, and with it what users expect of a sweep."""
    (expected,) = BasicSweeper.split_arguments(parsed(*overrides), max_batch_size=None)
    assert expand(parsed(*overrides), OPTIONS, choices) == expected


def test_a_glob_expands_to_the_files_of_its_group() -> None:
    assert runs("attack=glob(d*)", "seed=0,1") == ["attack=dba seed=0", "attack=dba seed=1"]


def test_a_setting_of_one_plugin_varies_only_in_its_runs() -> None:
    found = runs("defense=krum,flame", "pmr=0.2,0.3", "defense.flame.noise=0.1,0.2")
    assert found == [
        "defense=krum pmr=0.2",
        "defense=krum pmr=0.3",
        "defense=flame pmr=0.2 defense.noise=0.1",
        "defense=flame pmr=0.2 defense.noise=0.2",
        "defense=flame pmr=0.3 defense.noise=0.1",
        "defense=flame pmr=0.3 defense.noise=0.2",
    ]


def test_settings_of_several_plugins_are_combined() -> None:
    own = ["defense.flame.noise=0.1,0.2", "defense.krum.m=1,3", "+attack.ipm.x=7"]
    assert runs(*own, "defense=krum,flame", "attack=alie,ipm") == [
        "defense=krum attack=alie defense.m=1",
        "defense=krum attack=alie defense.m=3",
        "defense=krum attack=ipm defense.m=1 +attack.x=7",
        "defense=krum attack=ipm defense.m=3 +attack.x=7",
        "defense=flame attack=alie defense.noise=0.1",
        "defense=flame attack=alie defense.noise=0.2",
        "defense=flame attack=ipm defense.noise=0.1 +attack.x=7",
        "defense=flame attack=ipm defense.noise=0.2 +attack.x=7",
    ]


def test_the_default_choice_and_that_of_the_data_set_count() -> None:
    assert runs("defense.krum.m=1,3") == ["defense.m=1", "defense.m=3"]
    assert runs("dataset=mnist,iot_sample", "model.gru.width=8,16") == [
        "dataset=mnist",
        "dataset=iot_sample model.width=8",
        "dataset=iot_sample model.width=16",
    ]


def test_the_last_value_counts_and_one_plugin_goes_before_all() -> None:
    own = ["defense.dp.clip=1", "defense.dp.clip=2", "defense.clip=5"]
    assert runs("defense=dp", *own) == ["defense=dp defense.clip=5 defense.clip=2"]


def test_a_setting_that_no_run_has_is_a_user_error() -> None:
    line = r"^defense\.dp\.clip: no run of the sweep has defense=dp$"
    with pytest.raises(UserError, match=line):
        runs("defense=krum,flame", "defense.dp.clip=1,2")


def test_an_interval_and_an_empty_glob_are_user_errors() -> None:
    with pytest.raises(UserError, match=r"^lr=interval\(0,1\): must be a list or a range"):
        runs("lr=interval(0,1)")
    with pytest.raises(UserError, match=r"^defense=glob\(zzz\*\): matches nothing"):
        runs("defense=glob(zzz*)")
