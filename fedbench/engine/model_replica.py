"""A rank's copy of the network. Clients train it, or fresh copies of it, one after another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedbench.config import RunConfig
from fedbench.data import Dataset
from fedbench.engine.flat_parameters import ParameterLayout
from fedbench.engine.local_training import Classifier
from fedbench.engine.model_check import (
    check_no_other_lightning,
    check_output,
    check_parameters,
    prepare,
)
from fedbench.errors import UserError, first_line

OWN = ("torch", "fedbench")  # packages whose layers keep all their state in parameters and buffers


class ClientModule(NamedTuple):
    """What one client trains."""

    module: LightningModule
    layout: ParameterLayout


class ModelReplica:
    """The module on this rank's device, with its flat layout and the settings of its training."""

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        network: nn.Module,
        fabric: Fabric,
        rebuild: Callable[[], nn.Module] | None = None,
    ) -> None:
        self.fabric = fabric
        self.clip_grad = config.clip_grad
        self._config = config
        self._lr = config.lr  # of plain networks; LightningModules set their own
        self._rebuild = rebuild  # builds the same network again; None: it is copied
        self.module = self._prepared(network)
        self.layout = ParameterLayout(self.module)
        self.decode: Callable[[Tensor], Tensor] = dataset.decode
        self._is_reusable = all(map(_has_no_other_state, self.module.modules()))
        self._modes = [(part, part.training) for part in self.module.modules()]
        self._check_output(dataset)

    def train_mode(self) -> None:
        """Undo `eval`: parts that were built in eval mode stay in it, as in Lightning."""
        for part, mode in self._modes:
            part.training = mode

    def scale_lr(self, factor: float) -> None:
        """Train plain networks with `lr` times this factor from now on."""
        self._lr = self._config.lr * factor
        if isinstance(self.module, Classifier):
            self.module.lr = self._lr

    def client(self) -> ClientModule:
        """What the next client trains: this replica, if it cannot remember earlier clients."""
        if not self._is_reusable:
            return self.new_client()
        self.train_mode()
        return ClientModule(self.module, self.layout)

    def new_client(self) -> ClientModule:
        """A module that no client has trained, built as this replica was.

        A copy would be wrong for a module whose functions or hooks refer to the module itself.
        """
        if self._rebuild is None:
            self.train_mode()
            module = _copied(self.module)
        else:
            module = self._prepared(self._rebuild())
        return ClientModule(module, ParameterLayout(module))

    def _prepared(self, network: nn.Module) -> LightningModule:
        """Wrap a plain network; let a LightningModule create its layers; move it to the device."""
        compiled = getattr(network, "_orig_mod", None)  # by torch.compile, which hides the class
        network = compiled if isinstance(compiled, LightningModule) else network
        config, name = self._config, self._config.model.get("name", "custom")
        what = type(network).__name__
        if isinstance(network, LightningModule):
            module = network
            prepare(module, name)
        else:
            check_no_other_lightning(network, name)
            module = Classifier(network.train(), self._lr, config.momentum, config.weight_decay)
        check_parameters(module, name, what)
        self.fabric.to_device(module)
        return module

    def _check_output(self, dataset: Dataset) -> None:
        """Check the logits of real samples; leave no trace in the module."""
        start = self.layout.read_params(), self.layout.read_buffers()
        self.module.eval()
        with self.fabric.autocast():
            check_output(self.module, dataset, self._config.model.get("name", "custom"))
        self.layout.write(*start)
        self.train_mode()


def _has_no_other_state(part: nn.Module) -> bool:
    """Whether a layer remembers nothing beside its parameters and buffers."""
    has_hooks = part._forward_hooks or part._forward_pre_hooks or part._backward_hooks
    return type(part).__module__.partition(".")[0] in OWN and not has_hooks


def _copied(module: LightningModule) -> LightningModule:
    try:
        return copy.deepcopy(module)
    except Exception as error:
        raise UserError(
            f"{type(module).__name__}: cannot be copied for each client "
            f"({type(error).__name__}: {first_line(error)})"
        ) from error
