"""Several clients trained at once: a step of all is one step on stacked parameters [k, ...].

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

from fedbench.engine.captured_step import Gradients, can_record, loss_of
from fedbench.engine.local_training import Batch, Classifier, Training, batch_sizes, sgd_step
from fedbench.engine.population import Order, Population, Rows
from fedbench.engine.sequential import Trainer
from fedbench.errors import UserError, first_line
from fedbench.metrics import IGNORED

DROPOUT = (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.modules.dropout._DropoutNd)


def unsuited(module: LightningModule) -> str | None:
    """Why clients of this module cannot be stacked; None if they can."""
    if not isinstance(module, Classifier):
        return "it brings a training of its own"
    if any(True for _ in module.buffers()):
        return "its layers keep statistics, such as batch norm's"
    for layer in module.modules():
        rate = layer.dropout if isinstance(layer, nn.RNNBase) else getattr(layer, "p", 0)
        if isinstance(layer, (nn.RNNBase, *DROPOUT)) and rate > 0:
            return "its dropout would draw otherwise than for a client by itself"
    return None


class Stacks(Trainer):
    """Several clients at once, their parameters stacked."""

    name = "vectorized"

    def __init__(self, population: Population, size: int, full_precision: bool) -> None:
        super().__init__(population)
        assert isinstance(population.module, Classifier)  # see `unsuited`
        self.module = population.module
        self.size = size
        self.records = full_precision and can_record(self.module)
        k = min(size, population.config.most_clients)
        self.params = [param.new_empty(k, *param.shape) for param in population.layout.params]
        self.momenta = [torch.empty_like(param) for param in self.params]
        self._exact_loss = loss_of(self.module, population.dataset.decode)
        self._gradients: dict[int, Gradients] = {}  # by how many clients are in the stack

    def _loss(self, params: Sequence[Tensor], x: Tensor, y: Tensor) -> Tensor:
        """A client's."""
        with self.population.fabric.autocast():
            return self._exact_loss(params, x, y)

    def gradients(self, n: int) -> Gradients:
        """Of the losses [n] of the first n clients of the stack."""
        if n not in self._gradients:
            params = [param[:n] for param in self.params]
            self._gradients[n] = Gradients(self._loss, params, self.records, stacked=True)
        return self._gradients[n]

    def portions(self, order: Order) -> list[list[int]]:
        """Clients of much work with others of much; malicious ones apart, for their objective."""
        portions: list[list[int]] = []
        for malicious in (False, True):
            kind = [i for i, job in enumerate(order.jobs) if job.malicious is malicious]
            kind.sort(key=lambda i: -self.population.cost(order, order.jobs[i]))
            n_portions = math.ceil(len(kind) / self.size)
            bounds = [len(kind) * k // n_portions for k in range(n_portions + 1) if n_portions]
            portions += [kind[start:end] for start, end in itertools.pairwise(bounds)]
        return portions

    def fit(self, order: Order, trainings: Sequence[Training], out: Sequence[Rows]) -> None:
        if trainings:
            stack = Stack(self, order.params, trainings)
            stack.train()
            stack.write([rows.params for rows in out])


class Stack:
    """Clients that are trained side by side, those with the most steps first."""

    def __init__(self, stacks: Stacks, start: Tensor, trainings: Sequence[Training]) -> None:
        self.stacks, self.module = stacks, stacks.module
        self.clip_grad = stacks.population.config.clip_grad
        # A client's samples are as many in every epoch.
        n_steps = [
            training.epochs * len(batch_sizes(len(training.samples(0)[1]), training.batch_size))
            for training in trainings
        ]
        self.order = sorted(range(len(trainings)), key=lambda i: -n_steps[i])
        self.trainings = [trainings[i] for i in self.order]
        self.n_steps = [n_steps[i] for i in self.order]
        layout, k = stacks.population.layout, len(trainings)
        for param, place in zip(stacks.params, layout.layers.values(), strict=True):
            param[:k] = start[place].view(param.shape[1:])
        for momentum in stacks.momenta:
            momentum[:k] = 0

    @torch.no_grad()
    def train(self) -> None:
        """All steps of all clients; those who are done fall off the end of the stack."""
        self.module.train()
        streams = [_stream(training) for training in self.trainings]
        n = 0
        with _explained():
            for step in range(self.n_steps[0]):
                left = sum(total > step for total in self.n_steps)
                if left != n:
                    n = left
                    params = [param[:n] for param in self.stacks.params]
                    momenta = [momentum[:n] for momentum in self.stacks.momenta]
                epochs, batches = zip(*(next(stream) for stream in streams[:n]), strict=True)
                self._step(params, self._steepest(batches), momenta, epochs)

    def write(self, rows: Sequence[Tensor]) -> None:
        """The clients' parameters, each to its row [P], in the order that they were given."""
        for place, i in enumerate(self.order):
            torch.cat([param[place].flatten() for param in self.stacks.params], out=rows[i])

    def _steepest(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Gradients of each client's own objective: none depends on another's parameters."""
        x, y = (
            _padded([batch[i] for batch in batches], fill) for i, fill in ((0, 0), (1, IGNORED))
        )
        malicious = any(training.malice for training in self.trainings)
        computed = self.stacks.gradients(len(batches))(x, y, self._objective if malicious else None)
        # They may be left transposed, which the fused step would take for what they are not.
        gradients = [gradient.contiguous() for gradient in computed]
        if self.clip_grad is not None:
            lengths = torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)  # [k]
            shares = (self.clip_grad / (lengths + 1e-6)).clamp(max=1)  # as in `clip`
            for gradient in gradients:
                gradient.mul_(_beside(shares, gradient))
        return gradients

    def _objective(self, losses: Tensor, params: Sequence[Tensor]) -> Tensor:
        """The sum of what each client minimises."""
        own = zip(*(param.unbind() for param in params), strict=True)
        return torch.stack([*map(_objective, self.trainings, losses.unbind(), own)]).sum()

    def _step(
        self,
        params: list[Tensor],
        gradients: list[Tensor],
        momenta: list[Tensor],
        epochs: Sequence[int],
    ) -> None:
        """SGD, with each client's own learning rate; then what malicious clients do to theirs."""
        trainings = self.trainings[: len(epochs)]
        rates = [t.lr_in(epoch, self.module.lr) for t, epoch in zip(trainings, epochs, strict=True)]
        if len({*rates}) == 1:
            sgd_step(self.module, params, gradients, momenta, rates[0])
        else:
            steps = -params[0].new_tensor(rates)  # [k]
            for param, gradient, momentum in zip(params, gradients, momenta, strict=True):
                gradient.add_(param, alpha=self.module.weight_decay)
                momentum.mul_(self.module.momentum).add_(gradient)
                param.addcmul_(momentum, _beside(steps, param))
        for i, training in enumerate(trainings):
            if training.malice is not None:
                training.malice.project([param[i] for param in params])


def _stream(training: Training) -> Iterator[tuple[int, Batch]]:
    """A client's batches, each with its epoch."""
    for epoch in range(training.epochs):
        for batch in training.batches(epoch):
            yield epoch, batch


def _objective(training: Training, loss: Tensor, params: Sequence[Tensor]) -> Tensor:
    return loss if training.malice is None else training.malice.objective(loss, params)


def _padded(parts: Sequence[Tensor], fill: int) -> Tensor:
    """Batches as one [k, B, ...], the shorter ones filled up; what has no label does not count."""
    longest = max(map(len, parts))
    if all(len(part) == longest for part in parts):
        return torch.stack([*parts])
    stack = parts[0].new_full((len(parts), longest, *parts[0].shape[1:]), fill)
    for row, part in zip(stack, parts, strict=True):
        row[: len(part)] = part
    return stack


def _beside(values: Tensor, other: Tensor) -> Tensor:
    """[k] as it multiplies [k, ...]."""
    return values.view(-1, *[1] * (other.dim() - 1))


@contextmanager
def _explained() -> Iterator[None]:
    """What vmap does slowly it warns of at every step; what it cannot do it tells in many lines."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        try:
            yield
        except RuntimeError as error:
            if "vmap" not in str(error):
                raise
            raise UserError(
                f"executor=vectorized: this network cannot be stacked ({first_line(error)}), "
                "take sequential"
            ) from error
