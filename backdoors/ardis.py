"""ARDIS: Wang et al., Attack of the Tails: Yes, You Really Can Backdoor FL, NeurIPS 2020.

https://arxiv.org/abs/2007.05084

Sevens from Swedish church records (Kusetogullari et al., ARDIS: a Swedish historical handwritten
digit dataset, 2019), labeled as ones, for MNIST. They are read from the four files of ARDIS'
dataset IV as published: ARDIS_train_2828.csv, ARDIS_train_labels.csv, ARDIS_test_2828.csv and
ARDIS_test_labels.csv. Each line holds 784 pixels or a one-hot label of ten numbers, separated by
spaces.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedbench.backdoor import (
    BACKDOORS,
    Backdoor,
    BackdoorContext,
    BackdoorSamples,
    check_shape,
    check_target,
)
from fedbench.data import Spec
from fedbench.datasets.files import local_file, read_table

SHAPE = (1, 28, 28)


@BACKDOORS.register("ardis")
@dataclass(frozen=True)
class Ardis(Backdoor):
    """Historical handwritten digits of one class, read from files."""

    source: int = 7  # digit to mislabel
    target: int = 1  # label that the attacker wants
    folder: str | None = None  # None: ardis in $FEDBENCH_DATA or data

    def __post_init__(self) -> None:
        if not 0 <= self.source <= 9 or self.source == self.target:
            raise ValueError(
                f"source must be a digit 0..9 other than target={self.target}, got {self.source}"
            )

    def check(self, spec: Spec) -> None:
        check_shape("ARDIS digits", SHAPE, spec)
        check_target(self.target, spec)
        local_file(self.folder, "ardis")

    def inputs(self) -> list[Path]:
        return [local_file(self.folder, "ardis")]

    def prepare(self, context: BackdoorContext) -> BackdoorSamples:
        (folder,) = self.inputs()
        device = context.dataset.x_train.device
        train, test = (self._digits(folder, part).to(device) for part in ("train", "test"))
        return BackdoorSamples.with_target(train, test, self.target, context.dataset.augment)

    def _digits(self, folder: Path, part: str) -> Tensor:
        images, classes = (folder / f"ARDIS_{part}_{kind}.csv" for kind in ("2828", "labels"))
        pixels, labels = read_table(images, n_columns=784), read_table(classes, n_columns=10)
        if len(pixels) != len(labels):
            raise ValueError(
                f"{folder}: must have one label per image, "
                f"got {len(pixels)} {part} images and {len(labels)} labels"
            )
        one_hot = ((labels == 0) | (labels == 1)).all() and (labels.sum(dim=1) == 1).all()
        if not one_hot:
            raise ValueError(f"{classes}: each line must be one 1 and nine 0s")
        if not ((pixels >= 0) & (pixels <= 255) & (pixels == pixels.round())).all():
            raise ValueError(f"{images}: pixels must be whole numbers 0 to 255")
        wanted = labels.argmax(dim=1) == self.source
        if not wanted.any():
            raise ValueError(f"{folder}: no {part} image has the label {self.source}")
        return pixels[wanted].to(torch.uint8).view(-1, *SHAPE)
