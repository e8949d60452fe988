"""Run ids: two runs with the same id have the same results, and share a directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from fedbench.config import NO_EFFECT, RESULTS_VERSION, RunConfig
from fedbench.datasets.partition import PARTITIONS

# Settings that do not change the pretrained model either.
NO_EFFECT_BEFORE_ROUND_0 = (
    *("defense", "attack", "dataset.backdoors", "pmr", "pdr", "pdr_step", "pdr_end", "malicious"),
    *("rounds", "attack_start", "attack_rounds", "evaluate_every"),
)


def run_id(config: RunConfig, versions: Mapping[str, int | str]) -> str:
    """Return the defense's name and a short hash of everything that affects the results."""
    settings = settings_without(config, NO_EFFECT) | {"versions": dict(versions)}
    return f"{config.defense['name']}-{_digest(settings)}"


def pretrain_id(config: RunConfig, versions: Mapping[str, int | str]) -> str:
    """Return a short hash of everything that affects the benign rounds before round 0."""
    config = config.pretraining
    used = PARTITIONS[config.partition].setting
    ignored = [p.setting for p in PARTITIONS.values() if p.setting not in (None, used)]
    config = replace(config, **{key: getattr(RunConfig, key) for key in ignored})  # defaults
    settings = settings_without(config, (*NO_EFFECT, *NO_EFFECT_BEFORE_ROUND_0))
    return _digest(settings | {"versions": dict(versions)})


def settings_without(config: RunConfig, keys: Sequence[str]) -> dict[str, Any]:
    """Return the settings without `keys`, normalized: equivalent settings become equal."""
    settings = asdict(config) | {"pool": config.pool_size}
    if len(config.client_counts) == 1:
        settings["n_clients"] = config.fewest_clients
    if config.pretraining.split == config.split:
        del settings["pretrain_non_iid"]
    if config.lr_decay == 1:  # as before there was this setting
        del settings["lr_decay"]
    for key in keys:
        group, _, field_name = key.rpartition(".")
        (settings[group] if group else settings).pop(field_name, None)
    return settings


def _digest(settings: dict[str, Any]) -> str:
    text = json.dumps(settings | {"results": RESULTS_VERSION}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()
