"""Gradients by operations that are written down once and then only repeated.

In a small network most of a step is not arithmetic: autograd notes what it will have to undo,
modules look for hooks, every operation asks for memory. A recording is the list of the operations
that autograd makes, each with the memory that it reads and writes: on the same numbers it gives
the same bits.
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

# Layers that do the same at every step and draw nothing, and whose bookkeeping counts.
LAYERS = (nn.Sequential, nn.Flatten, nn.Linear, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.Identity)
SEEN = 10  # times that batches of a shape are seen, from which on they are worth a recording

Loss = Callable[[Sequence[Tensor], Tensor, Tensor], Tensor]  # of parameters, samples and labels
Objective = Callable[[Tensor, Sequence[Tensor]], Tensor]  # of the loss and the parameters

aten = torch.ops.aten
# Operations that give the same whatever the numbers are
SAME = (
    operator.getitem,
    aten.full.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.ones_like.default,
    aten.scalar_tensor.default,
    aten.zeros_like.default,
)


def can_record(module: LightningModule) -> TypeGuard[Classifier]:
    """Whether a step of the module is the same operations every time."""
    return type(module) is Classifier and all(
        type(layer) in LAYERS for layer in module.network.modules()
    )


def loss_of(module: Classifier, decode: Callable[[Tensor], Tensor]) -> Loss:
    """The module's loss as a function of its trainable parameters, raw samples and labels."""
    names = [name for name, param in module.named_parameters() if param.requires_grad]

    def loss(params: Sequence[Tensor], x: Tensor, y: Tensor) -> Tensor:
        named = dict(zip(names, params, strict=True))
        return module.loss(functional_call(module, named, (decode(x),)), y)

    return loss


class Gradients:
    """Of a loss by parameters that stay where they are in memory.

    If `stacked`, parameters, samples and labels are those of k clients [k, ...] with a loss each.
    """

    def __init__(
        self, loss: Loss, params: Sequence[Tensor], record: bool = True, stacked: bool = False
    ) -> None:
        self.params = [param.detach().requires_grad_() for param in params]  # same memory
        self.record, self.stacked = record, stacked
        n = len(self.params)

        def both(*given: Tensor) -> tuple[Tensor, ...]:
            """The loss; the gradients, times a slope."""
            x, y, slope = given[n:]
            value, pull = vjp(lambda *params: loss(params, x, y), *given[:n])[:2]
            return value, *pull(slope)

        self.loss = vmap(loss) if stacked else loss
        self.both = vmap(both) if stacked else both
        self._seen: Counter[tuple[torch.Size, torch.Size]] = Counter()
        self._recorded: dict[tuple[torch.Size, torch.Size], Recording] = {}

    def __call__(self, x: Tensor, y: Tensor, objective: Objective | None = None) -> list[Tensor]:
        """On a batch, of an objective if there is one; the next call overwrites them."""
        if not self.record:
            return self._by_autograd(x, y, objective)
        shapes = x.shape, y.shape
        recording = self._recorded.get(shapes)
        if recording is not None:
            return recording(x, y, objective)
        with torch.no_grad():
            slope = self.params[0].new_ones(x.shape[:1] if self.stacked else ())
            direct: Sequence[Tensor | None] = ()
            if objective is not None:
                value = self.loss(tuple(self.params), x, y)
                slope, direct = by_loss(objective, value, self.params)
            inputs = [*(param.detach() for param in self.params), x, y, slope]
            self._seen[shapes] += 1  # a recording takes as long as many calls
            if self._seen[shapes] >= SEEN:
                self._recorded[shapes] = Recording(self.both, self.params, x, y, slope)
            _, *gradients = self.both(*inputs)
        return added(gradients, direct)

    def _by_autograd(self, x: Tensor, y: Tensor, objective: Objective | None) -> list[Tensor]:
        with torch.enable_grad():
            value = self.loss(tuple(self.params), x, y)
            total = value if objective is None else objective(value, self.params)
            return [*torch.autograd.grad(total.sum(), self.params)]


class Recording:
    """A loss and its gradients on batches of one shape, as calls on memory that is never moved."""

    def __init__(
        self,
        both: Callable[..., tuple[Tensor, ...]],
        params: Sequence[Tensor],
        x: Tensor,
        y: Tensor,
        slope: Tensor,
    ) -> None:
        self.params = params
        self.x, self.y, self.slope = x.clone(), y.clone(), slope.clone()
        self.forward: list[Callable[[], object]] = []
        self.backward: list[Callable[[], object]] = []  # what depends on the slope
        with torch.no_grad():
            self.value, *self.gradients = self._written_down(both)

    def __call__(self, x: Tensor, y: Tensor, objective: Objective | None) -> list[Tensor]:
        self.x.copy_(x)
        self.y.copy_(y)
        for call in self.forward:
            call()
        direct: Sequence[Tensor | None] = ()
        if objective is None:
            self.slope.fill_(1)
        else:
            slope, direct = by_loss(objective, self.value, self.params)
            self.slope.copy_(slope)
        for call in self.backward:
            call()
        return added(self.gradients, direct)

    def _written_down(self, both: Callable[..., tuple[Tensor, ...]]) -> list[Tensor]:
        """Fills the lists of calls; where the loss and the gradients will be."""
        inputs = [*(param.detach() for param in self.params), self.x, self.y, self.slope]
        traced = make_fx(both)(*inputs)
        known: dict[Node, Any] = {}
        late: set[Node] = set()
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                known[node] = inputs[len(known)]
            elif node.op == "get_attr":
                known[node] = getattr(traced, node.target)
            elif node.op == "output":
                return [known[result] for result in node.args[0]]
            else:
                args = map_arg(node.args, known.__getitem__)
                kwargs = map_arg(node.kwargs, known.__getitem__)
                known[node] = node.target(*args, **kwargs)
                call = again(node.target, args, kwargs, known[node])
                if late & {*node.all_input_nodes}:
                    late.add(node)
                if call is not None:
                    (self.backward if node in late else self.forward).append(call)
            if known[node] is self.slope:
                late.add(node)
        raise AssertionError("a graph ends with its output")


def by_loss(
    objective: Objective, value: Tensor, params: Sequence[Tensor]
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """The slope of an objective by the loss, and its gradients but for those through the loss."""
    with torch.enable_grad():
        value = value.detach().requires_grad_()
        total = objective(value, params)
        slope, *direct = torch.autograd.grad(total, [value, *params], allow_unused=True)
    return torch.zeros_like(value) if slope is None else slope, direct


def added(gradients: list[Tensor], more: Sequence[Tensor | None]) -> list[Tensor]:
    """In place."""
    for gradient, other in zip(gradients, more, strict=False):
        if other is not None:
            gradient.add_(other)
    return gradients


def again(
    operation: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> Callable[[], object] | None:
    """A call that does the operation once more, into the same result; None for a result that is
    part of what it is made of, or the same every time."""
    if operation in SAME or _storages(result) & _storages([*args, *kwargs.values()]):
        return None
    if operation is aten.relu.default:  # what it is made of
        return partial(torch.clamp_min, *args, 0, out=result)
    if operation is aten._to_copy.default:
        return partial(result.copy_, *args)
    variant, names = _into(operation)
    if variant is None:
        return lambda: [*map(Tensor.copy_, _tuple(result), _tuple(operation(*args, **kwargs)))]
    return partial(variant, *args, **kwargs, **dict(zip(names, _tuple(result), strict=True)))


def _storages(values: Any) -> set[int]:
    listed = values if isinstance(values, list | tuple) else [values]
    return {value.untyped_storage().data_ptr() for value in listed if isinstance(value, Tensor)}


def _tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _into(operation: Any) -> tuple[Callable[..., Any] | None, list[str]]:
    """The variant of an operation that writes into given memory, and how that is called."""

    def read(overload: Any) -> list[tuple[str, str]]:
        return [(a.name, str(a.type)) for a in overload._schema.arguments if not a.is_out]

    packet = operation.overloadpacket
    for name in packet.overloads():
        overload = getattr(packet, name)
        outs = [argument.name for argument in overload._schema.arguments if argument.is_out]
        # Those that are generated copy what the usual operation gives.
        if outs and read(overload) == read(operation) and torch.Tag.generated not in overload.tags:
            # The function of torch, if there is one, takes half as long to be called.
            function = getattr(torch, packet.__name__, None) if outs == ["out"] else None
            return function or overload, outs
    return None, []
