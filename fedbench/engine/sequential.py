"""Trains one client after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedbench.engine.captured_step import GradientFunction, can_capture, loss_function
from fedbench.engine.executors import Backend
from fedbench.engine.flat_parameters import FlatModel
from fedbench.engine.local_training import (
    Classifier,
    LocalTraining,
    clip_gradients,
    sgd_step,
    train,
)
from fedbench.engine.model_replica import ModelReplica


class SequentialBackend(Backend):
    """One client after another, with captured steps where the network allows them."""

    name = "sequential"

    def __init__(self, replica: ModelReplica, capture: bool) -> None:
        super().__init__(replica)
        self.captured: CapturedTraining | None = None
        if capture and can_capture(replica.module):
            self.captured = CapturedTraining(replica, replica.module)

    def fit(
        self, start: FlatModel, trainings: Sequence[LocalTraining], out: Sequence[FlatModel]
    ) -> None:
        replica = self.replica
        for training, row in zip(trainings, out, strict=True):
            module, layout = replica.client()
            layout.write(*start)
            if self.captured is not None:
                self.captured.train(training)
            else:
                train(module, training, replica.fabric, replica.clip_grad)
            layout.read_params(out=row.params)
            layout.read_buffers(out=row.buffers)


class CapturedTraining:
    """`local_training.train` with captured steps: the same bits, without autograd's overhead."""

    def __init__(self, replica: ModelReplica, module: Classifier) -> None:
        self.module = module
        self.clip_grad = replica.clip_grad
        self.params = [param.detach() for param in replica.layout.params]  # same memory
        self.momenta = [torch.zeros_like(param) for param in self.params]
        self.gradients = GradientFunction(loss_function(module, replica.decode), self.params)

    @torch.no_grad()
    def train(self, training: LocalTraining) -> None:
        hooks = training.hooks
        objective = None if hooks is None else hooks.objective
        for momentum in self.momenta:
            momentum.zero_()
        for epoch in range(training.epochs):
            lr = training.lr_in(epoch, self.module.lr)
            for x, y in training.batches(epoch):
                gradients = self.gradients(x, y, objective)
                if self.clip_grad is not None:
                    clip_gradients(gradients, self.clip_grad)
                sgd_step(self.module, self.params, gradients, self.momenta, lr)
                if hooks is not None:
                    hooks.project(self.params)
