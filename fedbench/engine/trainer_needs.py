"""Decides whether a module needs Lightning's Trainer or whether the fast loop trains it exactly.

The fast loop (`local_training.train`) calls `training_step` and steps one optimizer and one
scheduler. A module that relies on anything else of Lightning needs the Trainer. In doubt the answer
is that it does: that costs time, but no correctness.
"""

from __future__ import annotations

import copy
import dis
import inspect
import re
from collections.abc import Iterator
from functools import cache, cached_property
from types import CodeType, FunctionType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.hooks import DataHooks, ModelHooks
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fedbench.engine.local_training import Classifier, configured_optimizers
from fedbench.engine.model_check import described
from fedbench.errors import UserError

# What the fast loop calls, and `log`, which has no effect on training
HONORED = ("forward", "training_step", "configure_optimizers", "configure_model")
IGNORED_CALLS = ("log", "log_dict")
# Hooks and helpers that training never calls: evaluation, data loaders, files and exports
NOT_TRAINING = re.compile(
    "validation|test|predict|dataloader|checkpoint|onnx|torchscript|tensorrt|freeze"
)
BEFORE_TRAINING = ("__init__", *HONORED[2:])  # may set attributes: they run anew for each client
TRAINER_STATE = {"trainer", "_trainer", "_fabric"}


def why_trainer(module: LightningModule) -> str | None:
    """Why the module needs Lightning's Trainer; None if the fast loop trains it exactly."""
    if type(module) is Classifier:
        return None
    name = type(module).__name__
    if not module.automatic_optimization:
        return f"{name} optimizes manually"
    for hook in sorted(training_hooks()):
        if overrides(module, hook):
            return f"{name} overrides {hook}"
    return _code_reason(module) or _optimizer_reason(module)


@cache
def training_hooks() -> frozenset[str]:
    """Methods of Lightning that training may call and the fast loop does not."""
    return frozenset(
        name
        for cls in (LightningModule, ModelHooks, DataHooks)
        for name, attribute in vars(cls).items()
        if isinstance(attribute, FunctionType)
        and not (name.startswith("_") or name in HONORED or NOT_TRAINING.search(name))
    )


@cache
def trainer_attributes() -> frozenset[str]:
    """Attributes of a LightningModule that are meaningful only with a Trainer."""
    return frozenset(
        name
        for name, attribute in vars(LightningModule).items()
        if not name.startswith("_") and name not in IGNORED_CALLS
        for function in _functions(attribute)
        if TRAINER_STATE & {*function.__code__.co_names}
    )


def overrides(module: LightningModule, name: str) -> bool:
    own = inspect.getattr_static(module, name)
    return own is not inspect.getattr_static(LightningModule, name)


def _code_reason(module: LightningModule) -> str | None:
    """A use of the Trainer, or of state that clients would share, in the user's own methods."""
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        return f"{type(module).__name__}.training_step takes dataloader_iter"
    for part in module.modules():
        if not isinstance(part, LightningModule) or type(part) is Classifier:
            continue
        methods, where = _own_methods(type(part)), type(part).__name__
        for method, (read, _) in methods.items():
            if used := sorted(read & trainer_attributes()):
                return f"{where}.{method} uses self.{used[0]}"
        for method in _reached_from("training_step", methods):
            if stored := sorted(methods[method][1]):
                return f"{where}.{method} sets the attribute {stored[0]}"
    return None


def _own_methods(cls: type) -> dict[str, tuple[set[str], set[str]]]:
    """The attributes that each of the user's methods reads and sets, evaluation left out."""
    methods: dict[str, tuple[set[str], set[str]]] = {}
    for base in reversed([base for base in cls.__mro__ if base not in LightningModule.__mro__]):
        for name, attribute in vars(base).items():
            if NOT_TRAINING.search(name):
                continue
            read, stored = methods.setdefault(name, (set(), set()))
            for function in _functions(attribute):
                for instruction in _instructions(function.__code__):
                    if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                        read.add(str(instruction.argval))
                    elif instruction.opname == "STORE_ATTR":
                        stored.add(str(instruction.argval))
    return methods


def _reached_from(start: str, methods: dict[str, tuple[set[str], set[str]]]) -> list[str]:
    """The methods that `start` may call, itself and `forward` included."""
    reached, waiting = [], [start, "forward"]
    while waiting:
        name = waiting.pop(0)
        if name in methods and name not in reached and name not in BEFORE_TRAINING:
            reached.append(name)
            waiting += sorted(methods[name][0])
    return reached


def _functions(attribute: Any) -> Iterator[FunctionType]:
    """The functions behind a method, a property or a decorated method."""
    if isinstance(attribute, property):
        found = [attribute.fget, attribute.fset]
    elif isinstance(attribute, cached_property):
        found = [attribute.func]
    else:
        found = [getattr(attribute, "__func__", attribute)]
    for function in found:
        if isinstance(unwrapped := inspect.unwrap(function), FunctionType):  # type: ignore[arg-type]
            yield unwrapped


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    """The instructions of a function and of the functions inside it."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)


def _optimizer_reason(module: LightningModule) -> str | None:
    name = type(module).__name__
    optimizers, schedulers = _configured(module)
    if len(optimizers) != 1:
        raise UserError(
            f"{name}.configure_optimizers returns {len(optimizers)} optimizers: set "
            "self.automatic_optimization = False and step them in training_step, or return one"
        )
    closure = inspect.signature(optimizers[0].step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return f"{type(optimizers[0]).__name__} needs a closure"
    if len(schedulers) > 1:
        return f"{name} has {len(schedulers)} schedulers"
    return _scheduler_reason(schedulers[0]) if schedulers else None


def _scheduler_reason(config: LRSchedulerConfig) -> str | None:
    kind = type(config.scheduler).__name__
    if config.reduce_on_plateau or config.monitor is not None:
        return f"{kind} monitors {config.monitor}"
    if config.frequency != 1:
        return f"{kind} has a frequency of {config.frequency}"
    return None if isinstance(config.scheduler, LRScheduler) else f"{kind} is not an LRScheduler"


def _configured(module: LightningModule) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Configure optimizers for a copy, or for the module itself if it cannot be copied."""
    try:
        tried = copy.deepcopy(module)
    except Exception:
        tried = module
    try:
        with torch.random.fork_rng([]):
            return configured_optimizers(tried)
    except UserError:
        raise
    except Exception as error:
        raise UserError(described(error, module)) from error
