"""Checks a model before training, and names the user's method in which an exception occurred."""

from __future__ import annotations

import inspect
from types import CodeType, FunctionType, TracebackType

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from fedbench.data import Dataset
from fedbench.errors import UserError, first_line

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
            f"model {model}: must return logits {expected} for {n} samples, got {found}"
        )


def described(error: BaseException, module: nn.Module) -> str:
    """`Net.training_step: TypeError: ...`, with the first method of the user that was running."""
    method = _running_method(error.__traceback__, _methods(module))
    return f"{method or ''}{type(error).__name__}: {first_line(error)}"


def _running_method(trace: TracebackType | None, methods: dict[CodeType, str]) -> str | None:
    while trace is not None:
        if (name := methods.get(trace.tb_frame.f_code)) is not None:
            return f"{name}: "
        trace = trace.tb_next
    return None


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
