"""Trains several clients at once: one step on stacked parameters [k, ...] by torch.func.vmap.

Small networks spend most of a step on calling operations; here k clients share each call.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedbench.engine.captured_step import GradientFunction, can_capture, loss_function
from fedbench.engine.executors import Backend
from fedbench.engine.flat_parameters import FlatModel
from fedbench.engine.local_training import (
    Batch,
    Classifier,
    LocalTraining,
    batch_sizes,
    sgd_step,
)
from fedbench.engine.model_replica import ModelReplica
from fedbench.errors import UserError, first_line
from fedbench.metrics import IGNORED

DROPOUT = (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.modules.dropout._DropoutNd)


def cannot_stack(module: LightningModule) -> str | None:
    """Why clients of this module cannot be stacked; None if they can."""
    if not isinstance(module, Classifier):
        return "it defines its own training"
    if any(True for _ in module.buffers()):
        return "its layers keep running statistics, as batch norm does"
    for layer in module.modules():
        rate = layer.dropout if isinstance(layer, nn.RNNBase) else getattr(layer, "p", 0)
        if isinstance(layer, (nn.RNNBase, *DROPOUT)) and rate > 0:
            return "its dropout would use different random numbers"
    return None


class VectorizedBackend(Backend):
    """Stacks of clients."""

    name = "vectorized"

    def __init__(
        self, replica: ModelReplica, stack_size: int, max_clients: int, capture: bool
    ) -> None:
        super().__init__(replica)
        assert isinstance(replica.module, Classifier)  # see `cannot_stack`
        self.module = replica.module
        self.stack_size = stack_size
        self.capture = capture and can_capture(self.module)
        k = min(stack_size, max_clients)
        self.params = [param.new_empty(k, *param.shape) for param in replica.layout.params]
        self.momenta = [torch.empty_like(param) for param in self.params]
        self._loss_function = loss_function(self.module, replica.decode)
        self._gradients: dict[int, GradientFunction] = {}  # by number of clients in the stack

    def _loss(self, params: Sequence[Tensor], x: Tensor, y: Tensor) -> Tensor:
        with self.replica.fabric.autocast():
            return self._loss_function(params, x, y)

    def gradients(self, n: int) -> GradientFunction:
        """Gradients of the losses [n] of the first n clients of the stack."""
        if n not in self._gradients:
            params = [param[:n] for param in self.params]
            self._gradients[n] = GradientFunction(self._loss, params, self.capture, stacked=True)
        return self._gradients[n]

    def groups(self, costs: Sequence[int], malicious: Sequence[bool]) -> list[list[int]]:
        """Clients of similar cost; malicious ones apart, because of their objective."""
        groups: list[list[int]] = []
        for kind in (False, True):
            clients = [i for i in range(len(costs)) if malicious[i] is kind]
            clients.sort(key=lambda i: -costs[i])
            n_groups = math.ceil(len(clients) / self.stack_size)
            bounds = [len(clients) * k // n_groups for k in range(n_groups + 1) if n_groups]
            groups += [clients[start:end] for start, end in itertools.pairwise(bounds)]
        return groups

    def fit(
        self, start: FlatModel, trainings: Sequence[LocalTraining], out: Sequence[FlatModel]
    ) -> None:
        if trainings:
            stack = ClientStack(self, start.params, trainings)
            stack.train()
            stack.write([row.params for row in out])


class ClientStack:
    """Clients trained side by side, those with the most steps first."""

    def __init__(
        self, backend: VectorizedBackend, start: Tensor, trainings: Sequence[LocalTraining]
    ) -> None:
        self.backend, self.module = backend, backend.module
        self.clip_grad = backend.replica.clip_grad
        # All epochs of a client have the same number of samples.
        n_steps = [
            training.epochs * len(batch_sizes(len(training.samples(0)[1]), training.batch_size))
            for training in trainings
        ]
        self.order = sorted(range(len(trainings)), key=lambda i: -n_steps[i])
        self.trainings = [trainings[i] for i in self.order]
        self.n_steps = [n_steps[i] for i in self.order]
        layers, k = backend.replica.layout.layers, len(trainings)
        for param, place in zip(backend.params, layers.values(), strict=True):
            param[:k] = start[place].view(param.shape[1:])
        for momentum in backend.momenta:
            momentum[:k] = 0

    @torch.no_grad()
    def train(self) -> None:
        """Run all steps; finished clients drop off the end of the stack."""
        self.module.train()
        streams = [_batches_with_epochs(training) for training in self.trainings]
        n = 0
        with _explain_vmap_errors():
            for step in range(self.n_steps[0]):
                n_left = sum(total > step for total in self.n_steps)
                if n_left != n:
                    n = n_left
                    params = [param[:n] for param in self.backend.params]
                    momenta = [momentum[:n] for momentum in self.backend.momenta]
                epochs, batches = zip(*(next(stream) for stream in streams[:n]), strict=True)
                self._step(params, self._gradients(batches), momenta, epochs)

    def write(self, rows: Sequence[Tensor]) -> None:
        """Copy each client's parameters to its row [P]; rows are in the order of `trainings`."""
        for place, i in enumerate(self.order):
            torch.cat([param[place].flatten() for param in self.backend.params], out=rows[i])

    def _gradients(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Gradients of each client's own objective; none depends on another's parameters."""
        x, y = (_pad([batch[i] for batch in batches], fill) for i, fill in ((0, 0), (1, IGNORED)))
        attacked = any(training.hooks for training in self.trainings)
        computed = self.backend.gradients(len(batches))(x, y, self._objective if attacked else None)
        # The fused SGD kernel would misread transposed gradients.
        gradients = [gradient.contiguous() for gradient in computed]
        if self.clip_grad is not None:
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)  # [k]
            scales = (self.clip_grad / (norms + 1e-6)).clamp(max=1)  # as in `clip_gradients`
            for gradient in gradients:
                gradient.mul_(_broadcast(scales, gradient))
        return gradients

    def _objective(self, losses: Tensor, params: Sequence[Tensor]) -> Tensor:
        """Sum of the clients' objectives."""
        own = zip(*(param.unbind() for param in params), strict=True)
        return torch.stack([*map(_objective, self.trainings, losses.unbind(), own)]).sum()

    def _step(
        self,
        params: list[Tensor],
        gradients: list[Tensor],
        momenta: list[Tensor],
        epochs: Sequence[int],
    ) -> None:
        """One SGD step with each client's own learning rate, then the attackers' projection."""
        trainings = self.trainings[: len(epochs)]
        rates = [t.lr_in(epoch, self.module.lr) for t, epoch in zip(trainings, epochs, strict=True)]
        if len({*rates}) == 1:
            sgd_step(self.module, params, gradients, momenta, rates[0])
        else:
            steps = -params[0].new_tensor(rates)  # [k]
            for param, gradient, momentum in zip(params, gradients, momenta, strict=True):
                gradient.add_(param, alpha=self.module.weight_decay)
                momentum.mul_(self.module.momentum).add_(gradient)
                param.addcmul_(momentum, _broadcast(steps, param))
        for i, training in enumerate(trainings):
            if training.hooks is not None:
                training.hooks.project([param[i] for param in params])


def _batches_with_epochs(training: LocalTraining) -> Iterator[tuple[int, Batch]]:
    for epoch in range(training.epochs):
        for batch in training.batches(epoch):
            yield epoch, batch


def _objective(training: LocalTraining, loss: Tensor, params: Sequence[Tensor]) -> Tensor:
    return loss if training.hooks is None else training.hooks.objective(loss, params)


def _pad(parts: Sequence[Tensor], fill: int) -> Tensor:
    """Stack batches to [k, B, ...], padding shorter ones; labels of padding are ignored."""
    longest = max(map(len, parts))
    if all(len(part) == longest for part in parts):
        return torch.stack([*parts])
    stack = parts[0].new_full((len(parts), longest, *parts[0].shape[1:]), fill)
    for row, part in zip(stack, parts, strict=True):
        row[: len(part)] = part
    return stack


def _broadcast(values: Tensor, like: Tensor) -> Tensor:
    """Reshape [k] to multiply [k, ...]."""
    return values.view(-1, *[1] * (like.dim() - 1))


@contextmanager
def _explain_vmap_errors() -> Iterator[None]:
    """Silence vmap's warnings at every step; turn its long error messages into one line."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        try:
            yield
        except RuntimeError as error:
            if "vmap" not in str(error):
                raise
            raise UserError(
                f"executor=vectorized: this network cannot be stacked ({first_line(error)}); "
                "use executor=sequential"
            ) from error
