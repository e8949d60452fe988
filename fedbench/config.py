"""RunConfig: the typed schema of `conf/config.yaml`, and its checks."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from fedbench.datasets.partition import PARTITIONS
from fedbench.errors import UserError, no_setting
from fedbench.multirun.resources import jobs
from fedbench.plugin_configs import register_plugin_configs
from fedbench.value_checks import check_values, shown

# Part of every run id. Raise it when the same settings give other numbers or other checkpoints.
RESULTS_VERSION = 7
MALICIOUS = ("fixed", "sampled")
GROUPS = ("defense", "attack", "dataset", "model", "executor", "tracker")
USER_ARGUMENTS = ("dataset.arguments", "model.arguments")  # the user's code checks them
# clip_grad=auto: the bound, and below how many clients of one class each it holds. On
# fmnist_sample (seed 100), 2 to 8 such clients diverged without, and 2 learned nothing with 5.
FEW_CLIENTS_CLIP, FEW_CLIENTS = 1.0, 20
# The least and the most of whole numbers. No run needs more. A seed has numpy's limit.
WHOLE = {
    "rounds": (1, 100_000),
    "pretrain_rounds": (0, 100_000),
    "attack_start": (0, 100_000),
    "evaluate_every": (1, 100_000),
    "local_epochs": (1, 10_000),
    "batch_size": (1, 1_000_000),
    "seed": (0, 2**32 - 1),
}
MOST_CLIENTS, LARGEST_POOL = 10_000, 1_000_000
LONGEST_NAME = 200  # bytes; a file name may have 255 in most file systems
# Settings that do not change the results: paths, tracking, how work is divided among processes.
# For `pretrained` the content of the file counts instead.
NO_EFFECT = (
    *("name", "out", "rerun", "tracker", "dataset.root", "pretrained"),
    *("executor.devices", "executor.capture"),
)


@dataclass
class RunConfig:
    """The settings of one run. Plugins check their own group, `check` the rest."""

    defense: dict[str, Any] = field(default_factory=dict)
    attack: dict[str, Any] = field(default_factory=dict)
    dataset: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    executor: dict[str, Any] = field(default_factory=dict)
    tracker: dict[str, Any] = field(default_factory=dict)

    pmr: float = 0.2
    malicious: str = "fixed"
    pdr: float = 0.5
    pdr_step: float = 0.0
    pdr_end: float | None = None
    n_clients: Any = 30  # or [fewest, most]; OmegaConf has no type for `int | list[int]`
    pool: int | None = None
    partition: str = "main_class"
    non_iid: float = 0.5
    dirichlet_alpha: float = 0.5

    pretrained: str | None = None
    pretrain_rounds: int = 20
    pretrain_non_iid: float | None = None
    rounds: int = 10
    attack_start: int = 0
    attack_rounds: list[int] | None = None
    evaluate_every: int = 1
    local_epochs: int = 2
    batch_size: int = 64
    lr: float = 0.05
    lr_decay: float = 1.0
    momentum: float = 0.9
    weight_decay: float = 0.0
    clip_grad: Any = "auto"  # a number, None or auto, which `__post_init__` replaces
    server_lr: float = 1.0
    seed: int = 0

    rerun: bool = False
    name: str = "default"
    out: str = "runs"

    def __post_init__(self) -> None:
        # `${oc.env:N}` is a string; OmegaConf converts it for typed settings only.
        if isinstance(self.n_clients, str) and self.n_clients.isdecimal():
            self.n_clients = int(self.n_clients)
        with suppress(TypeError, ValueError, LookupError):  # from values that `check` refuses
            if self.clip_grad == "auto":
                self.clip_grad = FEW_CLIENTS_CLIP if self._has_few_one_class_clients() else None
            if not isinstance(self.clip_grad, bool | None):
                self.clip_grad = float(self.clip_grad)

    def _has_few_one_class_clients(self) -> bool:
        """Whether plain SGD diverges: each client pulls the model to a class of its own.

        The first rounds decide, so that runs with the same pretraining clip alike.
        """
        partition, non_iid = self.partition, self.non_iid
        if (other := self._other_non_iid) is not None:
            partition, non_iid = "main_class", other
        return partition == "main_class" and non_iid == 1 and self.pool_size < FEW_CLIENTS

    @property
    def client_counts(self) -> range:
        """Possible numbers of clients in a round."""
        ranged = isinstance(self.n_clients, list)
        fewest, most = self.n_clients if ranged else (self.n_clients, self.n_clients)
        return range(fewest, most + 1)

    @property
    def fewest_clients(self) -> int:
        return self.client_counts[0]

    @property
    def most_clients(self) -> int:
        return self.client_counts[-1]

    def n_clients_in(self, index: int) -> int:
        """Number of clients in a round; a range is drawn from by seed and round only."""
        counts = self.client_counts
        if len(counts) == 1:
            return counts[0]
        import torch  # takes seconds, and the report and user errors do without

        from fedbench.rng import generator

        rng = generator(self.seed, "n_clients", index)
        return counts[int(torch.randint(len(counts), (), generator=rng))]

    @property
    def pool_size(self) -> int:
        """Number of clients in total."""
        return self.most_clients if self.pool is None else self.pool

    @property
    def pretraining(self) -> RunConfig:
        """The settings that partition the samples in the benign rounds before round 0."""
        other = self._other_non_iid
        return self if other is None else replace(self, partition="main_class", non_iid=other)

    @property
    def _other_non_iid(self) -> float | None:
        """`pretrain_non_iid`, None if it has no effect."""
        trained = self.pretrain_rounds > 0 and self.pretrained is None
        by_label = PARTITIONS[self.partition].by_label
        return self.pretrain_non_iid if trained and by_label else None

    @property
    def split(self) -> tuple[str, float | None]:
        """The partition and the value of its setting, which together assign samples to clients."""
        key = PARTITIONS[self.partition].setting
        return self.partition, None if key is None else getattr(self, key)

    def attacked_in(self, index: int) -> bool:
        """Whether malicious clients attack in this round."""
        listed = self.attack_rounds is None or index in self.attack_rounds
        return listed and index >= self.attack_start

    def evaluated_in(self, index: int) -> bool:
        """Whether MA and BA are measured after this round."""
        return (index + 1) % self.evaluate_every == 0 or index == self.rounds - 1

    def lr_scale_in(self, index: int) -> float:
        """Factor on `lr` in this round: one `lr_decay` more after every round, benign ones too."""
        n_before = index + (0 if self.pretrained is not None else self.pretrain_rounds)
        return float(self.lr_decay**n_before)

    def pdr_in(self, index: int) -> float:
        """Share of poisoned samples in this round: `pdr`, then one `pdr_step` more each round."""
        reached = self.pdr + self.pdr_step * max(index - self.attack_start, 0)
        if self.pdr_end is None:
            return min(max(reached, 0.0), 1.0)
        return min(reached, self.pdr_end) if self.pdr_step > 0 else max(reached, self.pdr_end)

    @classmethod
    def from_hydra(cls, composed: DictConfig) -> RunConfig:
        """Convert and check a configuration composed by Hydra."""
        known = cls.__dataclass_fields__
        for key in map(str, composed):  # `+key=value` bypasses the schema
            if key not in known:
                raise UserError(no_setting(key, known))
        config = OmegaConf.to_object(composed)
        assert isinstance(config, cls)
        config.check()
        return config

    def check(self) -> None:
        """Raise a UserError for the first value out of range."""
        for group in GROUPS:
            self._require(group, isinstance(getattr(self, group), dict), "settings of a plugin")
        check_values(asdict(self), except_in=USER_ARGUMENTS)
        for key in ("pmr", "pdr", "non_iid"):
            self._require(key, 0 <= getattr(self, key) <= 1, "between 0 and 1")
        valid = self.pretrain_non_iid is None or 0 <= self.pretrain_non_iid <= 1
        self._require("pretrain_non_iid", valid, "between 0 and 1, or null")
        for key, (least, most) in WHOLE.items():
            valid = least <= getattr(self, key) <= most
            self._require(key, valid, f"a whole number from {least} to {most}")
        self._require("lr_decay", 0 < self.lr_decay <= 1, "above 0, and at most 1")
        self._require("momentum", 0 <= self.momentum < 1, "at least 0 and below 1")
        self._require("weight_decay", 0 <= self.weight_decay < math.inf, "0 or more and finite")
        for key in ("lr", "server_lr", "dirichlet_alpha"):
            self._require(key, 0 < getattr(self, key) < math.inf, "above 0 and finite")
        clip = self.clip_grad
        valid = clip is None or (isinstance(clip, float) and 0 < clip < math.inf)
        self._require("clip_grad", valid, "above 0 and finite, null or auto")
        self._check_clients()
        self._require("malicious", self.malicious in MALICIOUS, f"one of {', '.join(MALICIOUS)}")
        self._check_schedule()
        self._require("partition", self.partition in PARTITIONS, f"one of {', '.join(PARTITIONS)}")
        valid = self.name != "" and "/" not in self.name and not self.name.startswith(".")
        valid = valid and len(self.name.encode()) <= LONGEST_NAME
        self._require("name", valid, f"a folder name of at most {LONGEST_NAME} bytes, not hidden")
        self._require("out", self.out != "", "a folder")

    def _check_clients(self) -> None:
        ends = self.n_clients if isinstance(self.n_clients, list) else [self.n_clients] * 2
        integers = len(ends) == 2 and all(type(n) is int for n in ends)  # bool is no int here
        rule = f"a whole number from 1 to {MOST_CLIENTS} or a range [fewest, most]"
        self._require("n_clients", integers and 1 <= ends[0] <= ends[1] <= MOST_CLIENTS, rule)
        rule = f"at least {self.most_clients}, because n_clients={self.n_clients}"
        self._require("pool", self.pool_size >= self.most_clients, rule)
        self._require("pool", self.pool_size <= LARGEST_POOL, f"at most {LARGEST_POOL}")

    def _check_schedule(self) -> None:
        self._require("pdr_step", math.isfinite(self.pdr_step), "finite")
        if self.pdr_end is not None:
            rule = f"other than 0, to reach pdr_end={self.pdr_end}"
            self._require("pdr_step", self.pdr_step != 0, rule)
            up = self.pdr_step > 0
            valid = self.pdr <= self.pdr_end <= 1 if up else 0 <= self.pdr_end <= self.pdr
            span = f"between pdr={self.pdr} and 1" if up else f"between 0 and pdr={self.pdr}"
            self._require("pdr_end", valid, f"{span}, because pdr_step={self.pdr_step}")
        if self.attack_rounds is not None:
            valid = all(self.attack_start <= r < self.rounds for r in self.attack_rounds)
            rule = (
                f"rounds from attack_start={self.attack_start} to {self.rounds - 1}, the last round"
            )
            self._require("attack_rounds", valid and self.attack_rounds != [], rule)

    def _require(self, key: str, valid: bool, rule: str) -> None:
        if not valid:
            raise UserError(f"{key}={shown(getattr(self, key))}: must be {rule}")


def rounded_count(rate: float, n: int) -> int:
    """Return rate * n, rounded to the nearest integer; a half is rounded up."""
    return int(rate * n + 0.5)


def register_schema() -> None:
    """Register the schema of `conf/config.yaml`, the config files of plugins and `${jobs:...}`.

    `${jobs:...}` is the number of runs of a sweep that fit on the machine at a time.
    """
    store = ConfigStore.instance()
    store.store(name="schema", node=RunConfig)
    # Keyword arguments of user code: any key without `+`, unlike everywhere else
    store.store(name="arguments", node=DictConfig({}, flags={"struct": False}))
    register_plugin_configs()
    OmegaConf.register_new_resolver("jobs", jobs, replace=True)
