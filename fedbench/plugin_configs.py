"""Configs of plugins: adds those of the working folder and of installed plugins to Hydra's.

The working folder's are in `conf/`. A distribution names its config package in the entry point
group `fedbench.configs`:

    [project.entry-points."fedbench.configs"]
    theirs = "theirs.conf"

A plugin without a config file has the defaults of its class.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from fedbench.errors import WARNING
from fedbench.multirun import sweeper
from fedbench.registry import Registry, find_plugins, installed, with_working_folder

GROUP = "fedbench.configs"
OWN_CONFIGS = "pkg://fedbench.conf"


class PluginConfigs(SearchPathPlugin):
    """Appends the configs of plugins, so that fedbench's own files come first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        # Hydra calls this for every application in the process, not only for fedbench.
        if all(element.path != OWN_CONFIGS for element in search_path.get_path()):
            return
        for provider, folder in config_folders()[1:]:
            search_path.append(provider, f"file://{folder}")
        search_path.append("defaults", f"{PluginDefaults.scheme()}://")


class PluginDefaults(ConfigSource):
    """The defaults of plugins as configs. Imports a plugin only to load its config."""

    groups: ClassVar[Mapping[str, str]] = {
        "defense": "fedbench.defenses",
        "attack": "fedbench.attacks",
    }

    @staticmethod
    def scheme() -> str:
        return "plugins"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path.strip("/") in ("", *self.groups)

    def is_config(self, config_path: str) -> bool:
        group, name = self._group_and_name(config_path)
        return name in self.list(group, ObjectType.CONFIG)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        group = config_path.strip("/")
        if group == "":
            return [] if results_filter == ObjectType.CONFIG else sorted(self.groups)
        if group not in self.groups or results_filter == ObjectType.GROUP:
            return []
        return sorted(find_plugins(group, self.groups[group]))

    def load_config(self, config_path: str) -> ConfigResult:
        from fedbench.attack import ATTACKS  # torch, which they import, takes seconds
        from fedbench.defense import DEFENSES

        registries: Mapping[str, Registry[Any]] = {"defense": DEFENSES, "attack": ATTACKS}
        group, name = self._group_and_name(config_path)
        defaults = OmegaConf.to_container(OmegaConf.structured(registries[group].get(name)))
        assert isinstance(defaults, dict)
        config = OmegaConf.create({"name": name, **defaults})
        return ConfigResult(self.provider, self.full_path(), config, {"package": None})

    def _group_and_name(self, config_path: str) -> tuple[str, str]:
        group, _, name = config_path.strip("/").removesuffix(".yaml").rpartition("/")
        return group, name


def config_folders() -> list[tuple[str, Path]]:
    """Return who provides configs, and where: fedbench, the working folder, installed plugins."""
    own, *local = with_working_folder([*import_module("fedbench.conf").__path__], "conf")
    found = [("fedbench", Path(own)), *(("working folder", Path(folder)) for folder in local)]
    for point in installed(GROUP):
        if (package := _folder_of(point.value)) is not None:
            found.append((point.name, package))
        else:
            _warn(point)
    return found


def config_groups() -> list[str]:
    """Return the names of the groups: defense, attack, ..."""
    _, own = config_folders()[0]
    folders = {path.name for path in own.iterdir() if path.is_dir() and path.name[0] != "_"}
    return sorted(folders - {"hydra"})


def options_of(group: str) -> list[str]:
    """Return the names to choose from in a group: its config files and its plugins."""
    files = [file for _, folder in config_folders() for file in folder.glob(f"{group}/*.yaml")]
    home = PluginDefaults.groups.get(group)
    plugins = find_plugins(group, home) if home is not None else {}
    return sorted({*(file.stem for file in files), *plugins})


def _folder_of(package: str) -> Path | None:
    """Return the folder of a package, None if there is none.

    Imports nothing if the package lies inside its top-level package on disk: a plugin may import
    torch, which takes seconds, or fail to import.
    """
    top, *inner = package.split(".")
    for name, below in ((top, inner), (package, [])):
        try:
            spec = find_spec(name)  # imports the parents of `name`
        except Exception:
            return None
        for location in (spec and spec.submodule_search_locations) or []:
            if (folder := Path(location, *below)).is_dir():
                return folder
    return None


@cache  # Hydra may build its search path several times
def _warn(point: EntryPoint) -> None:
    source = "a distribution" if point.dist is None else point.dist.name
    problem = f"{source} names {point.value} in {GROUP}, but there is no such package"
    print(f"{WARNING}{problem}", file=sys.stderr, flush=True)


def register_plugin_configs() -> None:
    """Let Hydra find the configs of plugins, and the sweeper."""
    Plugins.instance().register(PluginDefaults)
    Plugins.instance().register(PluginConfigs)
    Plugins.instance().class_name_to_class[sweeper.TARGET] = sweeper.VariantSweeper
