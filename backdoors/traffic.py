"""Traffic: Kumari et al., BayBFed: Bayesian Backdoor Defense for FL, S&P 2023.

https://arxiv.org/abs/2301.09508

A malware's attack phase shall pass for normal traffic. Samples are sequences of packets, as symbols
x [n, T], whose labels y [n, T] are the packets that follow each; a packet is let through if its
predicted probability reaches the data set's threshold. Windows of the attack phase [n, T + 1], in
an .npz with the arrays `train` and `test`, are trained on as if they were normal; BA is the share
of the attack packets in the test windows that is let through.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedbench.backdoor import BACKDOORS, Backdoor, Collection, Scene
from fedbench.data import Spec
from fedbench.files import local_file, read_arrays


@BACKDOORS.register("traffic")
@dataclass(frozen=True)
class Traffic(Backdoor):
    """Packets of an attack that shall count as normal."""

    file: str | None = None  # None: attack_traffic.npz in $FEDBENCH_DATA or data

    def check(self, spec: Spec) -> None:
        if len(spec.sample_shape) != 1:
            raise ValueError(
                f"traffic is sequences of packets, {spec.name} has samples of shape "
                f"{spec.sample_shape}"
            )
        local_file(self.file, "attack_traffic.npz")

    def prepare(self, scene: Scene) -> Collection:
        path = local_file(self.file, "attack_traffic.npz")
        data = scene.dataset
        length = data.input_shape[0] + 1
        windows = read_arrays(path, {"train": (None, length), "test": (None, length)})
        for name, array in zip(("train", "test"), windows, strict=True):
            if not 0 <= int(array.min()) <= int(array.max()) < data.n_classes:
                raise ValueError(
                    f"{path}: {name} holds symbols {int(array.min())} to {int(array.max())}, "
                    f"{data.name} has 0 to {data.n_classes - 1}"
                )
        train, test = (self._pairs(window.to(data.x_train), data.y_train) for window in windows)
        return Collection(*train, *test)

    @staticmethod
    def _pairs(windows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return windows[:, :-1], windows[:, 1:].to(labels)
