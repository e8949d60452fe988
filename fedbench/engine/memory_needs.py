"""Whether a run fits into memory, found out before anything is built."""

from __future__ import annotations

import torch

from fedbench.config import RunConfig
from fedbench.errors import UserError, is_out_of_memory
from fedbench.memory import check_memory
from fedbench.models import Custom, Model

# Models that exist at a time: the global one, the one sent out, the trained one with its gradient
# and momentum.
COPIES = 5
FLOAT = 4  # bytes


def check_fits(
    config: RunConfig, model: Model, input_shape: tuple[int, ...], n_classes: int
) -> None:
    """Raise a UserError if the model and a round's updates [N, P] need more memory than is free.

    The model is built without memory, on torch's device `meta`. The user's own modules may not
    work there: what they need shows when they are built.
    """
    if isinstance(model, Custom):
        return
    settings = [f"model.{key}={value}" for key, value in config.model.items() if key != "name"]
    what = " ".join([f"model={config.model['name']}", *settings, f"n_clients={config.n_clients}"])
    try:
        with torch.device("meta"):
            network = model.build(input_shape, n_classes)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise UserError(f"{what}: the model is too large for any memory") from error
        raise
    n_params = sum(param.numel() for param in network.parameters())
    check_memory(what, FLOAT * n_params * (COPIES + config.most_clients))
