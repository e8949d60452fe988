"""How the server combines the float buffers of clients, such as batch-norm statistics.

A defense judges updates [N, P] and never sees buffers [N, Q]. For every coordinate, with b_i the
value of client i, all the clients that passed the screening, and A those that the defense accepts:

    center = median over all of b_i
    spread = median over all of |b_i - center|
    result = median over A of b_i, kept within center +- SPREADS * spread

The result follows the clients whose updates enter the model. Its bounds depend on no verdict, and
fewer than half of the clients cannot move them further than SPREADS times the range of the honest
values beyond that range. The median over A alone would not do: a client with a clean update and
hostile buffers may be all that Krum accepts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedbench.ops import column_median

SPREADS = 1.5  # the standard deviation of normal values is 1.5 times their spread


def mean_buffers(buffers: Tensor, weights: Tensor) -> Tensor:
    """Mean of buffers [N, Q] with weights [N], for rules that defend against nothing."""
    return (weights @ buffers) / weights.sum()


def robust_buffers(buffers: Tensor, accepted: Tensor) -> Tensor:
    """Combine buffers [n, Q] of all clients that passed the screening; accepted is [n] bool."""
    if not buffers.numel():
        return buffers.new_zeros(buffers.shape[1])
    center = column_median(buffers)
    spread = SPREADS * column_median((buffers - center).abs())
    chosen = column_median(buffers[accepted])
    return torch.minimum(torch.maximum(chosen, center - spread), center + spread)
