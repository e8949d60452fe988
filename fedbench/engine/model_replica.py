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


class ModelReplica:
    """The module on this rank's device, with its flat layout and the settings of its training."""

    def __init__(
        self, config: RunConfig, dataset: Dataset, network: nn.Module, fabric: Fabric
    ) -> None:
        if not isinstance(network, LightningModule):
            network = Classifier(network, config.lr, config.momentum, config.weight_decay)
        self.module = network
        self.fabric = fabric
        fabric.to_device(self.module)
        self.layout = ParameterLayout(self.module)
        self.decode: Callable[[Tensor], Tensor] = dataset.decode
        self.clip_grad = config.clip_grad
