"""MA on the clean test set and BA on the triggered ones, for one rank's share of the batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedbench.backdoor import PreparedBackdoor
from fedbench.data import Dataset
from fedbench.engine.model_replica import ModelReplica
from fedbench.errors import UserError
from fedbench.metrics import BATCH, EvaluationSet, batch_size, count_correct


class Evaluator:
    """Evaluates models on the clean test set and on the test set of each backdoor."""

    def __init__(self, dataset: Dataset, replica: ModelReplica) -> None:
        self.dataset = dataset
        self.replica = replica
        self.clean = EvaluationSet(dataset.x_test, dataset.y_test)
        self.triggered: list[EvaluationSet] = []

    @property
    def sets(self) -> list[EvaluationSet]:
        """What MA is measured on, then what the BA of each backdoor is measured on."""
        return [self.clean, *self.triggered]

    def set_backdoors(self, backdoors: Sequence[PreparedBackdoor]) -> None:
        """Build the triggered test set of each backdoor."""
        x, y = self.dataset.x_test, self.dataset.y_test
        self.triggered = [backdoor.evaluation_set(x, y) for backdoor in backdoors]

    def count_correct(self, params: Tensor, buffers: Tensor, part: int, n_parts: int) -> Tensor:
        """Correct predictions on each set [sets], counting every `n_parts`-th batch from `part`."""
        data, replica = self.dataset, self.replica
        replica.layout.write(params, buffers)
        counts = []
        for chosen in self.sets:
            size = batch_size(chosen, data.n_classes)
            batches = range(part * size, len(chosen.x), n_parts * size)
            with replica.fabric.autocast():
                counts.append(
                    count_correct(
                        replica.module, chosen, data.decode, data.threshold, batches, size
                    )
                )
        return torch.stack(counts)


@torch.no_grad()
def last_layer_features(module: nn.Module, dataset: Dataset, x: Tensor) -> Tensor:
    """Input of the last linear layer for raw samples x [n, ...]: [n, F]."""
    inputs: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        for layer in module.modules()
        if isinstance(layer, nn.Linear)
    ]
    features = []
    module.eval()
    try:
        for batch in x.split(BATCH):
            inputs.clear()
            module(dataset.decode(batch))
            features += inputs[-1:]  # the layer that was called last
    finally:
        for hook in hooks:
            hook.remove()
    if not features or [len(part) for part in features] != [len(part) for part in x.split(BATCH)]:
        raise UserError("backdoor features are the inputs of the last linear layer; found none")
    return torch.cat(features)
