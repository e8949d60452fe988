"""Checks a model before training, and names the user's method in which an exception occurred."""

from __future__ import annotations

import inspect
import traceback
from types import CodeType, FunctionType

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from fedbench.data import Dataset
from fedbench.engine.local_training import Classifier
from fedbench.errors import UserError, first_line, place_of

REQUIRED = ("forward", "training_step", "configure_optimizers")
PROBED = 2  # samples; most wrong shapes do not show with one


def prepare(module: LightningModule, model: str) -> None:
    """Call `configure_model`; UserError unless the module defines what its training needs."""
    for name in REQUIRED:
        if inspect.getattr_static(module, name) is inspect.getattr_static(LightningModule, name):
            raise UserError(f"model {model}: {type(module).__name__} must define {name}")
    try:
        module.configure_model()
    except Exception as error:
        raise UserError(f"model {model}: {described(error, module)}") from error


def check_no_other_lightning(network: nn.Module, model: str) -> None:
    """Raise a UserError for a module that expects to train itself but would not."""
    name, bases = type(network).__name__, type(network).__mro__
    if any(base.__module__.startswith("pytorch_lightning.") for base in bases):
        raise UserError(
            f"model {model}: {name} is a LightningModule of the package pytorch_lightning; "
            "import LightningModule from lightning.pytorch"
        )
    if hasattr(network, "training_step") and hasattr(network, "configure_optimizers"):
        raise UserError(
            f"model {model}: {name} defines its own training; it must be a LightningModule of "
            "lightning.pytorch"
        )


def check_parameters(module: nn.Module, model: str, what: str) -> None:
    """Raise a UserError unless the parameters can be laid out as a vector [P]."""
    if any(isinstance(param, UninitializedParameter) for param in module.parameters()):
        raise UserError(f"model {model}: {what} has lazy layers, use layers of a fixed size")
    if not any(param.requires_grad for param in module.parameters()):
        raise UserError(f"model {model}: {what} must have trainable parameters, got none")


@torch.no_grad()
def check_output(module: nn.Module, dataset: Dataset, model: str) -> None:
    """Raise a UserError unless the module maps real samples to logits [B, C] or [B, T, C].

    Random numbers are restored afterwards. Call it in eval mode.
    """
    x, y = dataset.x_train[:PROBED], dataset.y_train[:PROBED]
    n, expected = len(x), (*y.shape, dataset.n_classes)
    network = module.network if isinstance(module, Classifier) else module
    on_gpu = x.device.type == "cuda" and torch.cuda.is_available()
    with torch.random.fork_rng([x.device] if on_gpu else []):
        try:
            logits = module(dataset.decode(x))
        except Exception as error:
            raise UserError(
                f"model {model}: fails on {n} samples of shape {tuple(x.shape[1:])}: "
                f"{described(error, module)}"
            ) from error
    found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if found != expected:
        raise UserError(
            f"model {model}: {type(network).__name__} must return logits {expected} for {n} "
            f"samples, got {found}"
        )


def described(error: BaseException, module: nn.Module) -> str:
    """`Net.training_step: TypeError: ... (net.py:12)`: the user's method, and where it failed."""
    methods, text = _methods(module), f"{type(error).__name__}: {first_line(error)}"
    codes = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    running = next((methods[code] for code in codes if code in methods), None)
    return text if running is None else f"{running}: {text} ({place_of(error)})"


def _methods(module: nn.Module) -> dict[CodeType, str]:
    """The methods of the user's own classes in a module."""
    classes = {cls for part in module.modules() for cls in type(part).__mro__}
    return {
        function.__code__: f"{cls.__name__}.{name}"
        for cls in classes
        if cls.__module__.partition(".")[0] not in ("builtins", "torch", "lightning", "fedbench")
        for name, attribute in vars(cls).items()
        if isinstance(function := inspect.unwrap(attribute), FunctionType)
    }
