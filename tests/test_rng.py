"""A draw depends on its purpose only."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from fedbench.rng import derive, generator, numpy_generator


def test_a_draw_is_reproducible() -> None:
    first, second = (torch.randn(4, generator=generator(1, "noise", 2, 3)) for _ in range(2))
    assert torch.equal(first, second)
    assert np.array_equal(*(numpy_generator(1, "noise", 2).random(4) for _ in range(2)))


def test_purposes_rounds_and_clients_do_not_share_draws() -> None:
    keys = itertools.product((0, 1), ("select", "noise"), (-1, 0, 1, 11), (0, 1, 11))
    seeds = [derive(*key) for key in keys]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_seeds_never_change_between_releases() -> None:
    assert derive(0, "batches", 3, 7) == 682472274117645573
