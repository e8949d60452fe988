"""Gradients by operations that are written down once and then only repeated.

In a small network most of a step is not arithmetic: autograd notes what it will have to undo,
modules look for hooks. What a recording repeats are the operations that autograd makes, on the same
numbers: the gradients are the same to the bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeGuard

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen

from fedbench.client import Classifier

# Layers that do the same at every step and draw nothing, and whose bookkeeping counts.
LAYERS = (nn.Sequential, nn.Flatten, nn.Linear, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.Identity)
SEEN = 10  # times that shapes are seen, from which on they are worth a recording

Gradients = Callable[..., tuple[Tensor, ...]]


def can_record(module: LightningModule) -> TypeGuard[Classifier]:
    """Whether a step of the module is the same operations every time."""
    return type(module) is Classifier and all(
        type(layer) in LAYERS for layer in module.network.modules()
    )


def loss_of(module: Classifier) -> Callable[[tuple[Tensor, ...], Tensor, Tensor], Tensor]:
    """The module's loss as a function of its trainable parameters, samples and labels."""
    names = [name for name, param in module.named_parameters() if param.requires_grad]

    def loss(params: tuple[Tensor, ...], x: Tensor, y: Tensor) -> Tensor:
        named = dict(zip(names, params, strict=True))
        return module.loss(functional_call(module, named, (x,)), y)

    return loss


class Recorder:
    """A function of tensors, recorded for shapes that come again and again."""

    def __init__(self, function: Gradients) -> None:
        self.function = function
        self._seen: Counter[tuple[torch.Size, ...]] = Counter()
        self._recorded: dict[tuple[torch.Size, ...], Gradients] = {}

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        shapes = tuple(tensor.shape for tensor in tensors)
        recorded = self._recorded.get(shapes)
        if recorded is not None:
            return recorded(*tensors)
        self._seen[shapes] += 1  # a recording takes as long as many calls
        if self._seen[shapes] >= SEEN:
            self._recorded[shapes] = record(self.function, *tensors)
        return self.function(*tensors)


def record(function: Gradients, *tensors: Tensor) -> Gradients:
    """The operations of the function on tensors of these shapes."""
    recorded = make_fx(function)(*tensors)
    transpose = torch.ops.aten.t.default
    for node in recorded.graph.nodes:
        before = node.args[0] if node.target is transpose else None
        if before is not None and before.target is transpose:  # twice is not at all
            node.replace_all_uses_with(before.args[0])
    recorded.graph.eliminate_dead_code()
    recorded.graph.set_codegen(CodeGen())  # plain arguments: the usual one unpacks structures
    recorded.recompile()
    return recorded.forward
