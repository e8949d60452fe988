"""Decides whether a module needs Lightning's Trainer or whether the fast loop trains it exactly.

The fast loop (`local_training.train`) calls `training_step` and steps one optimizer and one
scheduler. A module that relies on anything else of Lightning needs the Trainer. In doubt the answer
is that it does: that costs time, but no correctness. What this module cannot see, such as a
function outside the class that reads `current_epoch`, is an error in the fast loop
(`isolation.NoTrainer`).
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
    """A use of the Trainer in the user's own methods."""
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        return f"{type(module).__name__}.training_step takes dataloader_iter"
    for part in module.modules():
        if not isinstance(part, LightningModule) or type(part) is Classifier:
            continue
        for method, read in _own_methods(type(part)).items():
            if used := sorted(read & trainer_attributes()):
                return f"{type(part).__name__}.{method} uses self.{used[0]}"
    return None


def _own_methods(cls: type) -> dict[str, set[str]]:
    """The attributes that each of the user's methods reads; Lightning's evaluation is left out."""
    methods: dict[str, set[str]] = {}
    for base in reversed([base for base in cls.__mro__ if base not in LightningModule.__mro__]):
        for name, attribute in vars(base).items():
            if hasattr(LightningModule, name) and NOT_TRAINING.search(name):
                continue
            read = methods.setdefault(name, set())
            for function in _functions(attribute):
                for instruction in _instructions(function.__code__):
                    if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                        read.add(str(instruction.argval))
    return methods


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
    if (reason := _step_reason(optimizers[0])) is not None:
        return reason
    if len(schedulers) > 1:
        return f"{name} has {len(schedulers)} schedulers"
    return _scheduler_reason(schedulers[0]) if schedulers else None


def _step_reason(optimizer: Optimizer) -> str | None:
    """The Trainer calls `zero_grad` and passes a closure to `step`; the fast loop does neither."""
    kind = type(optimizer).__name__
    for name in ("step", "zero_grad"):
        owner = next(cls for cls in type(optimizer).__mro__ if name in vars(cls))
        if owner.__module__.partition(".")[0] != "torch":
            return f"{kind} defines {name}"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"{kind} has hooks"
    closure = inspect.signature(optimizer.step).parameters["closure"]
    return f"{kind} needs a closure" if closure.default is inspect.Parameter.empty else None


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
