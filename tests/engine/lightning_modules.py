"""LightningModules for tests of the Trainer: plain ones, and ones that need it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rank_contexts import first_round
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from fedbench.engine.client_runner import ClientRunner
from fedbench.engine.executors import Executor
from fedbench.engine.flat_parameters import FlatModel, ParameterLayout
from fedbench.engine.local_training import Batch, LocalTraining
from fedbench.engine.rank_context import RankContext


class Plain(LightningModule):
    """Trains with momentum, weight decay, dropout, batch norm and a scheduler per step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(784, 12),
            nn.BatchNorm1d(12),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(12, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]

    def loss(self, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1].long())

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        self.log_dict({"twice": 2 * loss})
        return loss

    def optimizer(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        scheduler = {"scheduler": StepLR(optimizer, 3, 0.7), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Manual(Plain):
    """Two optimizers and a scheduler, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        for optimizer in (first, second):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
        if batch_idx % 2:
            self.lr_schedulers().step()  # type: ignore[union-attr,call-arg]

    def configure_optimizers(self) -> Any:
        params = [*self.parameters()]
        first, second = SGD(params[:2], lr=0.1, momentum=0.9), torch.optim.Adam(params[2:], lr=0.01)
        return [first, second], [StepLR(first, 1, 0.8)]


class Plateau(Plain):
    """Lowers the learning rate when the logged loss stops falling."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("level", batch_idx + loss.detach().round(), on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        plateau = ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "level"}


class Frequency(Plain):
    """Steps its scheduler every second batch."""

    def configure_optimizers(self) -> Any:
        scheduler = StepLR(self.optimizer(), 1, 0.5)
        config = {"scheduler": scheduler, "interval": "step", "frequency": 2}
        return {"optimizer": scheduler.optimizer, "lr_scheduler": config}


class Clipping(Plain):
    """Clips each gradient by its value."""

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: Any = None,
        gradient_clip_algorithm: Any = None,
    ) -> None:
        self.clip_gradients(optimizer, 0.01, "value")


class Average(Callback):
    """Replaces the weights by their moving average at the end."""

    def __init__(self) -> None:
        self.mean: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: LightningModule, *args: Any) -> None:
        params = [param.detach().clone() for param in module.parameters()]
        pairs = zip(self.mean or params, params, strict=True)
        self.mean = [0.6 * mean + 0.4 * param for mean, param in pairs]

    def on_train_end(self, trainer: Any, module: LightningModule) -> None:
        for param, mean in zip(module.parameters(), self.mean, strict=True):
            param.data.copy_(mean)


class Averaged(Plain):
    def configure_callbacks(self) -> Any:
        return [Average()]


class Remembering(Plain):
    """Its loss depends on the number of steps that this object has made."""

    def __init__(self) -> None:
        super().__init__()
        self.n_steps = 0

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.n_steps += 1
        return self.loss(batch) * self.n_steps


class Epochs(Plain):
    """Its loss depends on the epoch and the step."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.loss(batch) * (1 + self.current_epoch) / (1 + self.global_step)


class Lbfgs(Plain):
    def optimizer(self) -> Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.05, max_iter=3)


NEED_TRAINER: dict[type[Plain], str] = {
    Manual: "Manual optimizes manually",
    Plateau: "ReduceLROnPlateau monitors level",
    Frequency: "StepLR has a frequency of 2",
    Clipping: "Clipping overrides configure_gradient_clipping",
    Averaged: "Averaged overrides configure_callbacks",
    Epochs: "Epochs.training_step uses self.current_epoch",
    Lbfgs: "LBFGS needs a closure",
}


class EpochBatches:
    """A client's batches for a Trainer that is run by hand; counts epochs by itself."""

    def __init__(self, training: LocalTraining) -> None:
        self.epochs = [[*training.batches(epoch)] for epoch in range(training.epochs)]
        self.decode = training.decode
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.epochs[0])

    def __iter__(self) -> Iterator[Batch]:
        batches = self.epochs[self.epoch]
        self.epoch += 1
        for x, y in batches:
            yield self.decode(x), y


def by_hand(
    module: LightningModule, training: LocalTraining, copied: bool = True, **settings: Any
) -> FlatModel:
    """Train a copy of the module, or the module itself, with an ordinary Trainer."""
    client = copy.deepcopy(module) if copied else module
    torch.manual_seed(training.seed)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=training.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        **settings,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(client, EpochBatches(training))
    layout = ParameterLayout(client)
    return FlatModel(layout.read_params(), layout.read_buffers())


def by_executor(executor: Executor, context: RankContext, position: int = 0) -> FlatModel:
    """Train one participant of round 0 from the model as it is."""
    round_, layout = first_round(context), context.replica.layout
    backend = executor.backend(context.replica, context.config)
    out = FlatModel(torch.empty_like(round_.params), torch.empty_like(round_.buffers))
    backend.fit(round_.model, [local_training(context, position)], [out])
    layout.write(*round_.model)
    return out


def local_training(context: RankContext, position: int = 0) -> LocalTraining:
    """The honest training of a participant of round 0."""
    round_ = first_round(context)
    runner = ClientRunner(context, None)  # type: ignore[arg-type]  # trains nothing
    return runner._local_training(round_, round_.participants[position])
