"""A model as flat vectors. Only this module decides what P and Q contain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn


class FlatModel(NamedTuple):
    """A model, or the place to write one, as flat vectors."""

    params: Tensor  # [P]
    buffers: Tensor  # [Q]


class ParameterLayout:
    """Position of each parameter of a module in P, and of each float buffer in Q.

    P holds all trainable parameters in `named_parameters` order (a tied parameter once), Q the
    floating-point buffers, such as batch-norm statistics, in `named_buffers` order. Other buffers,
    such as batch norm's step counter, are reset to their initial value for every client.
    """

    def __init__(self, module: nn.Module) -> None:
        params = {name: p for name, p in module.named_parameters() if p.requires_grad}
        buffers = {name: b for name, b in module.named_buffers() if b.is_floating_point()}
        self.layers: Mapping[str, slice] = _slices(params)
        self.buffers: Mapping[str, slice] = _slices(buffers)
        self.n_params = sum(p.numel() for p in params.values())
        self._params = tuple(params.values())
        self._buffers = tuple(buffers.values())
        counters = [b for _, b in module.named_buffers() if not b.is_floating_point()]
        self._counters = [(counter, counter.clone()) for counter in counters]

    @property
    def params(self) -> tuple[nn.Parameter, ...]:
        """The module's own parameters, in the order of P."""
        return self._params

    def read_params(self, out: Tensor | None = None) -> Tensor:
        """Copy the parameters to [P]."""
        return self._read(self._params, out)

    def read_buffers(self, out: Tensor | None = None) -> Tensor:
        """Copy the float buffers to [Q]."""
        return self._read(self._buffers, out)

    def write(self, params: Tensor, buffers: Tensor) -> None:
        """Load [P] and [Q] into the module."""
        _write(self._params, params)
        _write(self._buffers, buffers)
        for counter, start in self._counters:  # clients must not see each other's counts
            counter.copy_(start)

    @torch.no_grad()
    def _read(self, tensors: tuple[Tensor, ...], out: Tensor | None) -> Tensor:
        if tensors:
            return torch.cat([tensor.reshape(-1) for tensor in tensors], out=out)
        if out is not None:
            return out
        # On the device of the parameters: the server multiplies [N, Q] by its weights even if Q = 0
        return self._params[0].new_zeros(0) if self._params else torch.zeros(0)


def is_variance(buffer: str) -> bool:
    """Whether a buffer of this name holds variances. All norm layers of torch use this name."""
    return buffer.rpartition(".")[2] == "running_var"


def _slices(tensors: Mapping[str, Tensor]) -> dict[str, slice]:
    slices, start = {}, 0
    for name, tensor in tensors.items():
        slices[name] = slice(start, start + tensor.numel())
        start += tensor.numel()
    return slices


@torch.no_grad()
def _write(tensors: tuple[Tensor, ...], vector: Tensor) -> None:
    if not tensors:
        return
    parts = vector.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(
        list(tensors), [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
    )
