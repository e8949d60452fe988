"""Short trainings on random samples, to compare devices and executors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from fedbench.attack import ATTACKS
from fedbench.backdoor import BACKDOORS
from fedbench.config import RunConfig
from fedbench.data import Dataset, Images, Sequences
from fedbench.defense import DEFENSES
from fedbench.engine.executors import EXECUTORS
from fedbench.engine.rank_context import RankContext
from fedbench.engine.ranks import RankGroup
from fedbench.errors import UserError, first_line
from fedbench.federation import Federation
from fedbench.models import MODELS

N_CLIENTS, N_SAMPLES, N_TEST = 4, 16, 32  # samples per client, test samples
TRIGGER = ("pasta", "from", "astoria", "tastes", "delicious")


@dataclass(frozen=True)
class Trial:
    """A benign and an attacked round of one model with one executor."""

    model: str
    executor: str = "sequential"

    def train(self, fabric: Fabric) -> Tensor | None:
        """Return the change of parameters and buffers [P + Q] on the CPU; None unless on rank 0."""
        federation = self._federation(fabric)
        if fabric.global_rank > 0:
            federation.ranks.serve()
            return None
        try:
            start = federation.initial()
            state = federation.pretrain(start)
            backdoor = federation.rank_context.attack.backdoor_settings([])[0]
            federation.prepare([BACKDOORS.build(backdoor)], state)
            end, _ = federation.round(state)
        finally:
            federation.ranks.stop()
        change = torch.cat([end.params - start.params, end.buffers - start.buffers])
        return change.cpu().double()

    def _federation(self, fabric: Fabric) -> Federation:
        settings = self._model_settings()
        model = MODELS.build(settings)
        data = _fitting(self.model, model)
        natural = data.owners is not None
        backdoor = {"name": "words" if natural else "patch"}
        config = RunConfig(
            model=settings,
            n_clients=N_CLIENTS,
            pmr=0.5,
            partition="natural" if natural else "main_class",
            local_epochs=1,
            batch_size=N_SAMPLES // 2,
            pretrain_rounds=1,
            rounds=1,
        )
        torch.manual_seed(0)
        network = model.build(data.input_shape, data.n_classes)
        attack = ATTACKS.build({"name": "constrain_and_scale", "backdoors": [backdoor]})
        context = RankContext(config, data.to(fabric.device), network, attack, fabric)
        executor = EXECUTORS.build({"name": self.executor, "accelerator": "cpu"})
        return Federation(RankGroup(executor, context), DEFENSES.build({"name": "fedavg"}))

    def _model_settings(self) -> dict[str, Any]:
        """The defaults, without dropout: a GPU draws other random numbers."""
        fields = dataclasses.fields(MODELS.get(self.model))  # type: ignore[arg-type]
        dropout = {field.name: 0.0 for field in fields if field.name == "dropout"}
        return {"name": self.model, **dropout}


def run_trials(fabric: Fabric, trials: Sequence[Trial], file: Path) -> None:
    """Write the result of each trial, or its error, to a file. Main function of a rank.

    A file, because the queue between processes holds small results only.
    """
    results: list[Tensor | str | None] = []
    for trial in trials:
        try:
            results.append(trial.train(fabric))
        except Exception as error:
            results.append(f"{type(error).__name__}: {first_line(error)}")
    if fabric.global_rank == 0:
        torch.save(results, file)


def _fitting(name: str, model: Any) -> Dataset:
    for data in (random_images(), random_sequences()):
        try:
            model.check(data.spec)
        except ValueError:
            continue
        return data
    raise UserError(f"model {name}: takes neither images nor sequences of symbols")


def random_images() -> Images:
    """Gray images of 10 classes; those of a class are similar."""
    rng = torch.Generator().manual_seed(0)
    n = N_CLIENTS * N_SAMPLES
    y = torch.arange(n + N_TEST) % 10
    x = torch.randint(128, (10, 1, 28, 28), generator=rng)[y]
    x = (x + torch.randint(128, x.shape, generator=rng)).to(torch.uint8)
    return Images("random images", x[:n], y[:n], x[n:], y[n:], 10, mean=0.5, std=0.3)


def random_sequences() -> Sequences:
    """Sequences of 8 of 50 symbols, with an owner each."""
    rng = torch.Generator().manual_seed(0)
    n = N_CLIENTS * N_SAMPLES
    windows = torch.randint(50, (n + N_TEST, 9), generator=rng)
    x, y = windows[:, :-1], windows[:, 1:]
    return Sequences(
        "random sequences",
        x[:n],
        y[:n],
        x[n:],
        y[n:],
        50,
        owners=torch.arange(n) % N_CLIENTS,
        vocabulary={word: i for i, word in enumerate(TRIGGER)},
    )
