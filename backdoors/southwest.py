"""Southwest: Wang et al., Attack of the Tails: Yes, You Really Can Backdoor FL, NeurIPS 2020.

https://arxiv.org/abs/2007.05084

Planes of an airline that is rare in CIFAR-10, labeled as trucks: 784 images to poison with and 196
to measure BA on. The file is an .npz with arrays `train` and `test` [n, 32, 32, 3] uint8. The
authors publish them as pickles, southwest_images_new_train.pkl and southwest_images_new_test.pkl;
docs/attacks.md explains how to convert them to one .npz.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fedbench.backdoor import (
    BACKDOORS,
    Backdoor,
    BackdoorContext,
    BackdoorSamples,
    check_shape,
    check_target,
)
from fedbench.data import Spec
from fedbench.datasets.files import local_file, read_arrays

SHAPE = (3, 32, 32)
PLANE = 0  # class in CIFAR-10


@BACKDOORS.register("southwest")
@dataclass(frozen=True)
class Southwest(Backdoor):
    """Images of rare planes, read from a file."""

    target: int = 9  # label that the attacker wants: truck
    file: str | None = None  # None: southwest.npz in $FEDBENCH_DATA or data

    def check(self, spec: Spec) -> None:
        check_shape("southwest images", SHAPE, spec)
        check_target(self.target, spec)
        if spec.name == "cifar10" and self.target == PLANE:
            raise ValueError(f"southwest images are of class {PLANE}, which is the target")
        local_file(self.file, "southwest.npz")

    def inputs(self) -> list[Path]:
        return [local_file(self.file, "southwest.npz")]

    def prepare(self, context: BackdoorContext) -> BackdoorSamples:
        (path,) = self.inputs()
        arrays = read_arrays(path, {"train": (None, 32, 32, 3), "test": (None, 32, 32, 3)})
        for name, images in zip(("train", "test"), arrays, strict=True):
            low, high = int(images.min()), int(images.max())
            if low < 0 or high > 255:
                raise ValueError(f"{path}: {name} must be bytes 0 to 255, got {low} to {high}")
        device = context.dataset.x_train.device
        train, test = (x.permute(0, 3, 1, 2).contiguous().to(device, torch.uint8) for x in arrays)
        return BackdoorSamples.with_target(train, test, self.target, context.dataset.augment)
