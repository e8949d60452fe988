"""A rank's copy of the network. Clients train it one after another."""

from __future__ import annotations

from collections.abc import Callable

from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedbench.config import RunConfig
from fedbench.data import Dataset
from fedbench.engine.flat_parameters import ParameterLayout
from fedbench.engine.local_training import Classifier
from fedbench.engine.model_check import check_output, check_parameters, prepare


class ModelReplica:
    """The module on this rank's device, with its flat layout and the settings of its training."""

    def __init__(
        self, config: RunConfig, dataset: Dataset, network: nn.Module, fabric: Fabric
    ) -> None:
        model, what = config.model.get("name", "custom"), type(network).__name__
        if isinstance(network, LightningModule):
            prepare(network, model)
        else:
            network = Classifier(network.train(), config.lr, config.momentum, config.weight_decay)
        check_parameters(network, model, what)
        self.module = network
        self.fabric = fabric
        fabric.to_device(self.module)
        self.layout = ParameterLayout(self.module)
        self.decode: Callable[[Tensor], Tensor] = dataset.decode
        self.clip_grad = config.clip_grad
        self._modes = [(part, part.training) for part in self.module.modules()]
        self._check_output(dataset, model)

    def train_mode(self) -> None:
        """Undo `eval`: parts that were built in eval mode stay in it, as in Lightning."""
        for part, mode in self._modes:
            part.training = mode

    def _check_output(self, dataset: Dataset, model: str) -> None:
        """Check the logits of real samples; leave no trace in the module."""
        start = self.layout.read_params(), self.layout.read_buffers()
        self.module.eval()
        with self.fabric.autocast():
            check_output(self.module, dataset, model)
        self.layout.write(*start)
        self.train_mode()
