"""Checks of an attack's class, its backdoors, and how it poisons samples."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fedbench.attack import Attack, BackdoorAttack, Poisoning
from fedbench.backdoor import BACKDOORS, PixelTrigger, settings_of
from fedbench.config import rounded_count
from fedbench.data import Spec
from fedbench.testing.compare import Unchanged, bits, no_global_randomness, seed_globally
from fedbench.testing.contract import NotApplicable, check
from fedbench.testing.verify import value_error, verify_class

INVALID: dict[str, tuple[Any, ...]] = {  # settings of every BackdoorAttack, out of range
    "epochs": (0, -3),
    "lr": (0.0, -0.1, math.nan, math.inf),
    "lr_decay": (0.0, -1.0, math.nan, math.inf),
    "lr_decay_at": ([1.5], [0.2, -0.1], [math.nan]),
}
SHARES = (  # number of samples, pdr
    *[(7, 0.0), (7, 1.0), (1, 0.4999), (1, 0.5), (60, 0.1), (60, 1 / 3), (59, 0.999)],
    (5, 0.5),  # halves round up
)


def samples(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw images with values up to 200, so that a trigger of 255 shows, and labels 0 to 9."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 201, (n, 1, 8, 8), generator=rng, dtype=torch.uint8)
    return x, torch.randint(0, 10, (n,), generator=rng)


@cache
def patch(**settings: Any) -> PixelTrigger:
    backdoor = BACKDOORS.build({"name": "patch", "target": 3, "corner": "top_left"} | settings)
    assert isinstance(backdoor, PixelTrigger)
    return backdoor


def poisoning(pdr: float, seed: int = 0) -> Poisoning:
    return Poisoning(0, (patch(),), pdr, 10, torch.Generator().manual_seed(seed))


def targeted(attack: Attack) -> BackdoorAttack:
    if not isinstance(attack, BackdoorAttack):
        raise NotApplicable("for subclasses of BackdoorAttack")
    return attack


@check()
def plugin_class(attack: Attack) -> None:
    """The class is a frozen dataclass and derives from Attack."""
    verify_class(attack, Attack)


@check("plugin_class", cases=[(s, v) for s, values in INVALID.items() for v in values])
def training_settings(attack: Attack, setting: str, value: Any) -> None:
    """Training settings of a BackdoorAttack that are out of range raise ValueError."""
    attack = targeted(attack)
    line = value_error(lambda: dataclasses.replace(attack, **{setting: value}))
    assert line is not None, (
        f"{setting}={value} must raise ValueError; call super().__post_init__()"
    )
    clear = setting in line and str(value) in line and "\n" not in line
    assert clear, f"the error must name {setting} and {value} in one line, got: {line}"


@check("plugin_class")
def backdoors(attack: Attack) -> None:
    """A BackdoorAttack has backdoors that can be built, and refuses to have none."""
    attack = targeted(attack)
    chosen = attack.backdoor_settings([{"name": "patch"}])
    assert chosen, "backdoor_settings must return at least one backdoor, got none"
    for backdoor in chosen:
        BACKDOORS.build(settings_of(backdoor))
    line = value_error(lambda: attack.check([], Spec("images", (1, 28, 28), 10)))
    assert line is not None, "check must raise ValueError without backdoors; call super().check"


@check("plugin_class", cases=SHARES)
def poison_inputs(attack: Attack, n: int, pdr: float) -> None:
    """`poison` leaves its inputs unchanged and returns the same shapes and dtypes."""
    x, y = samples(n)
    unchanged = Unchanged(x=x, y=y)
    found = attack.poison(x, y, poisoning(pdr))
    unchanged.verify("poison")
    for name, old, new in zip("xy", (x, y), found, strict=True):
        same = (new.shape, new.dtype) == (old.shape, old.dtype)
        assert same, (
            f"poison must return {name} as {old.dtype} of shape {tuple(old.shape)}, "
            f"got {new.dtype} of shape {tuple(new.shape)}"
        )


@check("poison_inputs")
def poison_seed(attack: Attack) -> None:
    """`poison` draws from `poisoning.rng` only."""
    x, y = samples(200)
    found = []
    for seed in (1, 2):
        seed_globally(seed)
        with no_global_randomness("poison"):
            found.append(bits([*attack.poison(x, y, poisoning(0.5, seed=4))]))
    assert found[0] == found[1], "poison differs between two calls with equal generators"


@check("poison_seed", optional=True)
def poison_draw(attack: Attack) -> None:
    """A BackdoorAttack draws which samples to poison: another seed, other samples."""
    x, y = samples(200)
    first, other = (targeted(attack).poison(x, y, poisoning(0.5, seed=s))[0] for s in (4, 5))
    assert not torch.equal(first, other), "poison uses the same samples for every seed"


@check("poison_inputs", cases=SHARES, optional=True)
def poison_share(attack: Attack, n: int, pdr: float) -> None:
    """A BackdoorAttack poisons exactly a share `pdr` of the samples, and relabels only these."""
    verify_share(targeted(attack), n, pdr, seed=0)


def verify_share(attack: BackdoorAttack, n: int, pdr: float, seed: int) -> None:
    """Fail unless `poison` stamps round(pdr * n) of n samples and relabels exactly these."""
    x, y = samples(n, seed)
    how = poisoning(pdr, seed)
    poisoned_x, poisoned_y = attack.poison(x, y, how)
    stamped = (poisoned_x != x).flatten(1).any(dim=1)
    expected, n_stamped = rounded_count(pdr, n), int(stamped.sum())
    assert n_stamped == expected, (
        f"pdr={pdr:g} of {n} samples must poison {expected}, got {n_stamped}; "
        "poisoning.choose(n) draws them"
    )
    relabeled = bool((poisoned_y[stamped] == patch().target).all())
    assert relabeled, "poisoned samples must have the label of the backdoor"
    kept = torch.equal(poisoned_y[~stamped], y[~stamped])
    assert kept, "labels of clean samples must stay as they are"
