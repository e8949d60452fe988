"""A model that does not fit into memory is refused before it is built."""

from __future__ import annotations

import pytest

from fedbench.config import RunConfig
from fedbench.engine.memory_needs import check_fits
from fedbench.errors import UserError, one_line
from fedbench.models import MLP, Custom


def needs(hidden: list[int], n_clients: int = 30) -> None:
    config = RunConfig(model={"name": "mlp", "hidden": hidden}, n_clients=n_clients)
    check_fits(config, MLP(hidden), (1, 28, 28), 10)


def test_a_model_larger_than_memory_is_one_line() -> None:
    needs([256, 128])
    with pytest.raises(UserError) as caught:
        needs([100_000_000])
    start = "model=mlp model.hidden=[100000000] n_clients=30: needs about 11.1 TB of memory, "
    assert str(caught.value).startswith(start)
    with pytest.raises(UserError, match="needs about"):  # the updates of a round
        needs([100_000], n_clients=10_000)
    with pytest.raises(UserError, match="the model is too large for any memory"):
        needs([2**32 - 1, 2**32 - 1])


def test_the_users_own_modules_are_not_built_twice() -> None:
    check_fits(RunConfig(), Custom("torch.nn.Flatten"), (1, 28, 28), 10)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 9 TiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
    ],
)
def test_memory_that_runs_out_later_is_one_line(error: Exception) -> None:
    assert str(one_line(error)).startswith("fedbench: memory ran out: ")
    assert one_line(RuntimeError("another")) is None
