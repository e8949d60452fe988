"""How clients are trained: one after another, here; several at once is in stacked.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from fedbench.engine.captured_step import Gradients, can_record, loss_of
from fedbench.engine.local_training import Classifier, Training, clip, sgd_step, train
from fedbench.engine.population import Order, Population, Rows


class Trainer(ABC):
    """Trains the clients of a population; one object serves all rounds."""

    name: ClassVar[str]  # of the executor

    def __init__(self, population: Population) -> None:
        self.population = population

    @abstractmethod
    def portions(self, order: Order) -> list[list[int]]:
        """The order's clients, by their places in `order.jobs`, as they are trained together.

        They do not depend on the number of processes: so neither do the results.
        """

    @abstractmethod
    def fit(self, order: Order, trainings: Sequence[Training], out: Sequence[Rows]) -> None:
        """Trains the clients of a portion, each from the order's model, into its rows."""


class OneByOne(Trainer):
    """One client after another."""

    name = "sequential"

    def __init__(self, population: Population, full_precision: bool) -> None:
        super().__init__(population)
        module = population.module
        self.plain: PlainTraining | None = None
        if full_precision and can_record(module):
            self.plain = PlainTraining(population, module)

    def portions(self, order: Order) -> list[list[int]]:
        return [[i] for i in range(len(order.jobs))]

    def fit(self, order: Order, trainings: Sequence[Training], out: Sequence[Rows]) -> None:
        population = self.population
        layout, clip_grad = population.layout, population.config.clip_grad
        for training, rows in zip(trainings, out, strict=True):
            layout.write(order.params, order.buffers)
            if self.plain is not None:
                self.plain.train(training, clip_grad)
            else:
                train(population.module, training, population.fabric, clip_grad)
            layout.read_params(out=rows.params)
            layout.read_buffers(out=rows.buffers)


class PlainTraining:
    """What `client.train` does, to the bit, for networks that can be recorded."""

    def __init__(self, population: Population, module: Classifier) -> None:
        self.module = module
        self.params = [param.detach() for param in population.layout.params]  # same memory
        self.momenta = [torch.zeros_like(param) for param in self.params]
        self.gradients = Gradients(loss_of(module, population.dataset.decode), self.params)

    @torch.no_grad()
    def train(self, training: Training, clip_grad: float | None) -> None:
        malice = training.malice
        objective = None if malice is None else malice.objective
        for momentum in self.momenta:
            momentum.zero_()
        for epoch in range(training.epochs):
            lr = training.lr_in(epoch, self.module.lr)
            for x, y in training.batches(epoch):
                gradients = self.gradients(x, y, objective)
                if clip_grad is not None:
                    clip(gradients, clip_grad)
                sgd_step(self.module, self.params, gradients, self.momenta, lr)
                if malice is not None:
                    malice.project(self.params)
