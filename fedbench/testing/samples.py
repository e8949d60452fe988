"""Small data sets to try attacks and backdoors on."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fedbench.backdoor import BackdoorContext
from fedbench.data import Dataset, Features, Images, Sequences

N_TRAIN, N_TEST, N_CLASSES = 240, 60, 10
WORDS = ("pasta", "from", "astoria", "tastes", "delicious")


@cache
def images(*shape: int) -> Images:
    """Return images [C, H, W] of ten classes, each class brighter in its own rows."""
    x, y = [], []
    for n in (N_TRAIN, N_TEST):
        rng = torch.Generator().manual_seed(n)
        labels = torch.arange(n) % N_CLASSES
        pixels = torch.randint(0, 100, (n, *shape), generator=rng)
        rows = torch.arange(shape[-2]) * N_CLASSES // shape[-2]  # [H] class of each row
        pixels += 100 * (labels[:, None] == rows)[:, None, :, None]
        x.append(pixels.to(torch.uint8))
        y.append(labels)
    name = f"example images {shape}"
    return Images(name, x[0], y[0], x[1], y[1], N_CLASSES, mean=0.24, std=0.16)


def feature_vectors(n_features: int = 12) -> Features:
    """Return feature vectors [F] of ten classes."""
    rng = torch.Generator().manual_seed(0)
    y = torch.arange(N_TRAIN + N_TEST) % N_CLASSES
    x = torch.randn(len(y), n_features, generator=rng) + y[:, None]
    mean, std = x[:N_TRAIN].mean(dim=0), x[:N_TRAIN].std(dim=0)
    train, test = (x[:N_TRAIN], y[:N_TRAIN]), (x[N_TRAIN:], y[N_TRAIN:])
    return Features("example features", *train, *test, N_CLASSES, mean=mean, std=std)


def sequences(length: int = 8) -> Sequences:
    """Return sequences of symbols, with words to use as a trigger and windows of an attack."""
    rng = torch.Generator().manual_seed(0)
    windows = torch.randint(0, N_CLASSES, (N_TRAIN + N_TEST, length + 1), generator=rng)
    attack = torch.randint(0, N_CLASSES, (20, length + 1), generator=rng)
    symbols = [*WORDS, *(f"symbol {i}" for i in range(N_CLASSES - len(WORDS)))]
    train, test = windows[:N_TRAIN], windows[N_TRAIN:]
    return Sequences(
        "example sequences",
        train[:, :-1],
        train[:, 1:],
        test[:, :-1],
        test[:, 1:],
        N_CLASSES,
        vocabulary={symbol: i for i, symbol in enumerate(symbols)},
        attacks={"scan": (attack[:12], attack[12:])},
    )


def examples() -> list[Dataset]:
    """Return the data sets on which a backdoor is tried."""
    return [images(1, 28, 28), images(3, 32, 32), feature_vectors(), sequences()]


def context_of(dataset: Dataset) -> BackdoorContext:
    """Return what a backdoor is prepared from, if malicious clients hold half of the samples."""

    def features(x: Tensor) -> Tensor:
        flat = dataset.decode(x).flatten(1).float()
        return flat[:, :: max(1, flat.shape[1] // 50)]

    held = torch.arange(len(dataset.x_train) // 2)
    return BackdoorContext(dataset, held, features)
