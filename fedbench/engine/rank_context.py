"""Everything a rank needs to train and evaluate the clients of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from fedbench.attack import Attack, AttackView
from fedbench.backdoor import BackdoorContext, PreparedBackdoor
from fedbench.config import RunConfig
from fedbench.data import Dataset
from fedbench.engine.client_data import ClientData
from fedbench.engine.client_selection import Round, Selection
from fedbench.engine.evaluation import Evaluator, last_layer_features
from fedbench.engine.model_replica import ModelReplica


class RankContext:
    """The federation as one rank sees it. Every rank builds the same one."""

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        network: nn.Module,
        attack: Attack,
        fabric: Fabric,
        rebuild: Callable[[], nn.Module] | None = None,
    ) -> None:
        self.config = config
        self.dataset = dataset
        self.attack = attack
        self.replica = ModelReplica(config, dataset, network, fabric, rebuild)
        self.selection = Selection(config, attack.active)
        self.data = ClientData(config, dataset, attack, self.selection.malicious)
        self.evaluator = Evaluator(dataset, self.replica)

    @property
    def attackers(self) -> Sequence[int]:
        """Clients that attack at some point of the run."""
        return self.selection.malicious if self.attack.active else ()

    def set_backdoors(self, backdoors: Sequence[PreparedBackdoor]) -> None:
        """Give malicious clients what they plant, and the evaluator what BA is measured on."""
        self.data.backdoors = backdoors
        self.evaluator.set_backdoors(backdoors)

    def backdoor_context(self, params: Tensor, buffers: Tensor) -> BackdoorContext:
        """What backdoors are prepared from; params and buffers are the model before round 0."""

        def features(x: Tensor) -> Tensor:
            self.replica.layout.write(params, buffers)
            return last_layer_features(self.replica.module, self.dataset, x)

        return BackdoorContext(self.dataset, self.data.malicious_samples(), features)

    def attack_view(self, round_: Round, rng: torch.Generator) -> AttackView:
        return AttackView(
            index=round_.index,
            global_params=round_.params,
            layers=self.replica.layout.layers,
            n_clients=len(round_.participants),
            n_malicious=round_.n_malicious,
            server_lr=self.config.server_lr,
            rng=rng,
        )
