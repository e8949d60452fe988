"""Sweeps are expanded as Hydra's basic sweeper expands them, so what is checked is what runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hydra import initialize_config_module
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from fedbench.errors import UserError
from fedbench.multirun.hydra_callback import expand


@pytest.fixture(autouse=True)
def hydra() -> Iterator[None]:
    with initialize_config_module("fedbench.conf", version_base="1.3"):
        yield
    GlobalHydra.instance().clear()


def parsed(*overrides: str) -> list[Override]:
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    return parser.parse_overrides(list(overrides))


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
    ],
    ids=" ".join,
)
def test_a_sweep_is_expanded_as_by_hydra(overrides: list[str]) -> None:
    """If this fails, Hydra's sweeper has changed, and with it what a sweep must check."""
    (expected,) = BasicSweeper.split_arguments(parsed(*overrides), max_batch_size=None)
    assert expand(parsed(*overrides)) == expected


def test_a_glob_expands_to_the_files_of_its_group() -> None:
    runs = expand(parsed("attack=glob(d*)", "seed=0,1"))
    assert runs == [["attack=dba", "seed=0"], ["attack=dba", "seed=1"]]


def test_an_interval_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"^lr=interval\(0,1\): must be a list or a range"):
        expand(parsed("lr=interval(0,1)"))
