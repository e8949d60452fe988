"""Captured gradient steps: trace a step once, then replay its operations on fixed memory.

Small networks spend most of a step on overhead: autograd builds a graph, modules look for hooks,
every operation allocates its result. A captured step is the list of operations that autograd runs,
each bound to the memory it reads and writes, as in a CUDA graph but on the CPU. Replaying it on the
same numbers gives the same bits.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.fx import Node, map_arg
from torch.fx.experimental.proxy_tensor import make_fx

from fedbench.engine.local_training import Classifier

# Layers without randomness or data-dependent control flow, in networks where overhead dominates
LAYERS = (nn.Sequential, nn.Flatten, nn.Linear, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.Identity)
CAPTURE_AFTER = 10  # batches of one shape; capturing costs as much as many plain steps

Loss = Callable[[Sequence[Tensor], Tensor, Tensor], Tensor]  # (params, samples, labels) -> loss
Objective = Callable[[Tensor, Sequence[Tensor]], Tensor]  # (loss, params) -> what is minimized

aten = torch.ops.aten
# Operations whose result does not depend on the values of their inputs
CONSTANT = (
    operator.getitem,
    aten.full.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.ones_like.default,
    aten.scalar_tensor.default,
    aten.zeros_like.default,
)


def can_capture(module: LightningModule) -> TypeGuard[Classifier]:
    """Whether every step of the module runs the same operations."""
    return type(module) is Classifier and all(
        type(layer) in LAYERS for layer in module.network.modules()
    )


def loss_function(module: Classifier, decode: Callable[[Tensor], Tensor]) -> Loss:
    """The module's loss as a function of its trainable parameters, raw samples and labels."""
    names = [name for name, param in module.named_parameters() if param.requires_grad]

    def loss(params: Sequence[Tensor], x: Tensor, y: Tensor) -> Tensor:
        named = dict(zip(names, params, strict=True))
        return module.loss(functional_call(module, named, (decode(x),)), y)

    return loss


class GradientFunction:
    """Gradients of a loss with respect to parameters that stay at one place in memory.

    If `stacked`, parameters, samples and labels are those of k clients [k, ...], each with its own
    loss.
    """

    def __init__(
        self, loss: Loss, params: Sequence[Tensor], capture: bool = True, stacked: bool = False
    ) -> None:
        self.params = [param.detach().requires_grad_() for param in params]  # same memory
        self.capture, self.stacked = capture, stacked
        n = len(self.params)

        def loss_and_gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
            x, y, slope = inputs[n:]
            value, pull = vjp(lambda *params: loss(params, x, y), *inputs[:n])[:2]
            return value, *pull(slope)

        self.loss = vmap(loss) if stacked else loss
        self.loss_and_gradients = vmap(loss_and_gradients) if stacked else loss_and_gradients
        self._seen: Counter[tuple[torch.Size, torch.Size]] = Counter()
        self._captured: dict[tuple[torch.Size, torch.Size], CapturedStep] = {}

    def __call__(self, x: Tensor, y: Tensor, objective: Objective | None = None) -> list[Tensor]:
        """Gradients on a batch, of `objective` if given; the next call overwrites them."""
        if not self.capture:
            return self._by_autograd(x, y, objective)
        shapes = x.shape, y.shape
        captured = self._captured.get(shapes)
        if captured is not None:
            return captured(x, y, objective)
        with torch.no_grad():
            slope = self.params[0].new_ones(x.shape[:1] if self.stacked else ())
            direct: Sequence[Tensor | None] = ()
            if objective is not None:
                value = self.loss(tuple(self.params), x, y)
                slope, direct = objective_gradients(objective, value, self.params)
            inputs = [*(param.detach() for param in self.params), x, y, slope]
            self._seen[shapes] += 1
            if self._seen[shapes] >= CAPTURE_AFTER:
                self._captured[shapes] = CapturedStep(
                    self.loss_and_gradients, self.params, x, y, slope
                )
            _, *gradients = self.loss_and_gradients(*inputs)
        return _add(gradients, direct)

    def _by_autograd(self, x: Tensor, y: Tensor, objective: Objective | None) -> list[Tensor]:
        with torch.enable_grad():
            value = self.loss(tuple(self.params), x, y)
            total = value if objective is None else objective(value, self.params)
            return [*torch.autograd.grad(total.sum(), self.params)]


class CapturedStep:
    """Loss and gradients on batches of one shape, as calls on memory that never moves."""

    def __init__(
        self,
        loss_and_gradients: Callable[..., tuple[Tensor, ...]],
        params: Sequence[Tensor],
        x: Tensor,
        y: Tensor,
        slope: Tensor,
    ) -> None:
        self.params = params
        self.x, self.y, self.slope = x.clone(), y.clone(), slope.clone()
        self.forward: list[Callable[[], object]] = []
        self.backward: list[Callable[[], object]] = []  # calls that depend on the slope
        with torch.no_grad():
            self.value, *self.gradients = self._capture(loss_and_gradients)

    def __call__(self, x: Tensor, y: Tensor, objective: Objective | None) -> list[Tensor]:
        self.x.copy_(x)
        self.y.copy_(y)
        for call in self.forward:
            call()
        direct: Sequence[Tensor | None] = ()
        if objective is None:
            self.slope.fill_(1)
        else:
            slope, direct = objective_gradients(objective, self.value, self.params)
            self.slope.copy_(slope)
        for call in self.backward:
            call()
        return _add(self.gradients, direct)

    def _capture(self, loss_and_gradients: Callable[..., tuple[Tensor, ...]]) -> list[Tensor]:
        """Fill the lists of calls; return the memory of the loss and of the gradients."""
        inputs = [*(param.detach() for param in self.params), self.x, self.y, self.slope]
        traced = make_fx(loss_and_gradients)(*inputs)
        results: dict[Node, Any] = {}
        after_slope: set[Node] = set()
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                results[node] = inputs[len(results)]
            elif node.op == "get_attr":
                results[node] = getattr(traced, node.target)
            elif node.op == "output":
                return [results[result] for result in node.args[0]]
            else:
                args = map_arg(node.args, results.__getitem__)
                kwargs = map_arg(node.kwargs, results.__getitem__)
                results[node] = node.target(*args, **kwargs)
                call = _replay_call(node.target, args, kwargs, results[node])
                if after_slope & {*node.all_input_nodes}:
                    after_slope.add(node)
                if call is not None:
                    (self.backward if node in after_slope else self.forward).append(call)
            if results[node] is self.slope:
                after_slope.add(node)
        raise AssertionError("an fx graph ends with its output node")


def objective_gradients(
    objective: Objective, value: Tensor, params: Sequence[Tensor]
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Derivative of an objective by the loss, and by the parameters other than through the loss."""
    with torch.enable_grad():
        value = value.detach().requires_grad_()
        total = objective(value, params)
        slope, *direct = torch.autograd.grad(total, [value, *params], allow_unused=True)
    return torch.zeros_like(value) if slope is None else slope, direct


def _add(gradients: list[Tensor], others: Sequence[Tensor | None]) -> list[Tensor]:
    """Add in place."""
    for gradient, other in zip(gradients, others, strict=False):
        if other is not None:
            gradient.add_(other)
    return gradients


def _replay_call(
    operation: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> Callable[[], object] | None:
    """A call that recomputes an operation into the memory of its result.

    None if the result is a view of an input, or a constant: it needs no recomputation.
    """
    if operation in CONSTANT or _storages(result) & _storages([*args, *kwargs.values()]):
        return None
    if operation is aten.relu.default:  # relu has no out= variant; clamp_min is its kernel
        return partial(torch.clamp_min, *args, 0, out=result)
    if operation is aten._to_copy.default:
        return partial(result.copy_, *args)
    variant, names = _out_variant(operation)
    if variant is None:
        return lambda: [*map(Tensor.copy_, _tuple(result), _tuple(operation(*args, **kwargs)))]
    return partial(variant, *args, **kwargs, **dict(zip(names, _tuple(result), strict=True)))


def _storages(values: Any) -> set[int]:
    listed = values if isinstance(values, list | tuple) else [values]
    return {value.untyped_storage().data_ptr() for value in listed if isinstance(value, Tensor)}


def _tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _out_variant(operation: Any) -> tuple[Callable[..., Any] | None, list[str]]:
    """The out= variant of an operation, and the names of its output arguments."""

    def inputs(overload: Any) -> list[tuple[str, str]]:
        return [(a.name, str(a.type)) for a in overload._schema.arguments if not a.is_out]

    packet = operation.overloadpacket
    for name in packet.overloads():
        overload = getattr(packet, name)
        outs = [argument.name for argument in overload._schema.arguments if argument.is_out]
        # Generated variants compute as usual and then copy: they save nothing.
        if (
            outs
            and inputs(overload) == inputs(operation)
            and torch.Tag.generated not in overload.tags
        ):
            # Where torch.<name> exists, calling it takes half as long as the overload.
            function = getattr(torch, packet.__name__, None) if outs == ["out"] else None
            return function or overload, outs
    return None, []
