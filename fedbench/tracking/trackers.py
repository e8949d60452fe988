"""Trackers: send the rounds of a run to Weights & Biases, or nowhere.

A tracker never affects the run. It works on its own thread, so no round waits for it, and a failure
prints one line on the console.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbench.errors import nearest
from fedbench.registry import Registry, require
from fedbench.results.origin import Origin, read_origin
from fedbench.tracking.wandb_rows import config_values

if TYPE_CHECKING:
    from fedbench.config import RunConfig

MODES = ("auto", "online", "offline")
LONGEST_TIMEOUT = 86_400  # seconds, a day


@dataclass(frozen=True)
class RunInfo:
    """What a tracker knows about a run when its session starts."""

    id: str
    name: str
    group: str  # `name` of the configuration, shared by the runs of a sweep
    tags: tuple[str, ...]
    config: Mapping[str, Any]  # flat, see `config_values`
    directory: Path
    earlier: tuple[Mapping[str, Any], ...] = ()  # records of the rounds before the session
    in_sweep: bool = False  # what the session says is about all runs of the sweep

    @classmethod
    def of(
        cls,
        config: RunConfig,
        title: str,
        directory: Path,
        earlier: Sequence[Mapping[str, Any]],
        in_sweep: bool = False,
    ) -> RunInfo:
        plugins = (config.defense, config.attack, config.dataset)
        origin = read_origin(directory) or Origin()
        return cls(
            id=directory.name,
            name=title,
            group=config.name,
            tags=tuple(str(plugin["name"]) for plugin in plugins),
            config=config_values(asdict(config), origin.choices),
            directory=directory,
            earlier=tuple(earlier),
            in_sweep=in_sweep,
        )


class Session:
    """One tracked run. No method raises. This base class discards everything."""

    def round(self, record: Mapping[str, Any]) -> None:
        """Log a line of rounds.jsonl; the caller must not change it afterwards."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Log summary.json and end the session, in bounded time."""

    def interrupt(self) -> None:
        """End the session within two seconds: the user ends the run, or the system does."""


class Tracker(ABC):
    """A tracking service; its fields are its settings."""

    @abstractmethod
    def open(self, run: RunInfo, say: Callable[[str], None]) -> Session:
        """Start a session; `say` prints a line and may be called from another thread."""


TRACKERS: Registry[Tracker] = Registry("tracker", "fedbench.tracking.trackers")


@TRACKERS.register("none")
@dataclass(frozen=True)
class NoTracker(Tracker):
    def open(self, run: RunInfo, say: Callable[[str], None]) -> Session:
        return Session()


@TRACKERS.register("wandb")
@dataclass(frozen=True)
class Wandb(Tracker):
    project: str = "fedbench"
    entity: str | None = None  # None: the account's default
    mode: str = "auto"  # auto: as WANDB_MODE or `wandb offline` say, otherwise online if logged in
    init_timeout: float = 20.0  # seconds to reach the server
    finish_timeout: float = 60.0  # seconds to upload the rest when a run ends

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode}: no such mode{nearest(self.mode, MODES)}")
        for name in ("init_timeout", "finish_timeout"):
            valid = 0 < getattr(self, name) <= LONGEST_TIMEOUT
            require(self, name, valid, f"above 0 and at most {LONGEST_TIMEOUT} seconds")

    def open(self, run: RunInfo, say: Callable[[str], None]) -> Session:
        from fedbench.tracking.wandb_session import WandbSession  # it imports this module

        return WandbSession(self, run, say)
