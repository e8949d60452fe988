"""fake_gpu: it computes the right numbers, and refuses what CUDA refuses."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fake_gpu import FakeGpuTensor, fabric_on, fake_gpus
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def gpus() -> Iterator[None]:
    with fake_gpus():
        yield


def ones(device: str = "cuda:0", *shape: int) -> Tensor:
    return torch.ones(*shape or (3,), device=device)


MIXES: dict[str, Callable[[], Any]] = {
    "add": lambda: ones() + ones("cpu"),
    "add from the CPU": lambda: ones("cpu") + ones(),
    "in place": lambda: ones().add_(ones("cpu")),
    "in place on a CPU scalar": lambda: torch.tensor(1.0).add_(ones()[0]),
    "two GPUs": lambda: ones() + ones("cuda:1"),
    "scalars of two GPUs": lambda: ones() + ones("cuda:1")[0],
    "matmul": lambda: ones() @ ones("cpu"),
    "matmul with no values": lambda: ones() @ torch.zeros(3, 0),
    "cat": lambda: torch.cat([ones(), ones("cpu")]),
    "cat into the CPU": lambda: torch.cat([ones(), ones()], out=torch.zeros(6)),
    "stack": lambda: torch.stack([ones()[0], torch.tensor(1.0)]),
    "equal": lambda: torch.equal(ones(), ones("cpu")),
    "where": lambda: torch.where(ones() > 0, ones(), ones("cpu")),
    "mask on another GPU": lambda: ones()[ones("cuda:1") > 0],
    "GPU index of a CPU tensor": lambda: ones("cpu")[torch.zeros(1, dtype=torch.long).to("cuda:0")],
    "assign from the CPU": lambda: ones().index_put_((torch.tensor([0, 1]),), torch.ones(2)),
    "index_select": lambda: ones().index_select(0, torch.tensor([0])),
    "index_copy": lambda: ones().index_copy(0, torch.tensor([0]), ones()[:1]),
    "module": lambda: nn.Linear(3, 2)(ones()),
    "loss": lambda: nn.functional.cross_entropy(ones("cuda:0", 2, 3), torch.tensor([0, 1])),
    "generator": lambda: torch.randn(3, generator=torch.Generator(), device="cuda"),
    "generator in place": lambda: ones().normal_(generator=torch.Generator()),
    "stacked": lambda: torch.func.vmap(torch.dot)(ones("cuda:0", 2, 3), ones("cpu", 2, 3)),
}


@pytest.mark.parametrize("mix", MIXES)
def test_a_mix_of_devices_raises(mix: str) -> None:
    with pytest.raises(RuntimeError, match="device"):
        MIXES[mix]()


@pytest.mark.parametrize("convert", [lambda x: x.numpy(), np.asarray])
def test_numpy_needs_the_cpu(convert: Callable[[Tensor], Any]) -> None:
    with pytest.raises(TypeError, match=r"can't convert cuda:0 .* Use Tensor.cpu\(\)"):
        convert(ones())
    assert convert(ones().cpu()).tolist() == [1, 1, 1]


ALLOWED: dict[str, Callable[[], Tensor]] = {
    "CPU scalar": lambda: ones() * torch.tensor(2.0),
    "CPU scalar first": lambda: torch.tensor(2.0) * ones(),
    "CPU index": lambda: 2 * ones()[torch.tensor([0, 1, 2])],
    "CPU mask": lambda: 2 * ones()[torch.tensor([True, True, True])],
    "copy from the CPU": lambda: ones().copy_(torch.full((3,), 2.0)),
    "copy from another GPU": lambda: ones().copy_(torch.full((3,), 2.0, device="cuda:1")),
    "new_tensor": lambda: ones().new_tensor([2.0, 2.0, 2.0]),
    "to": lambda: torch.full((3,), 2.0).to(ones()),
    "move": lambda: torch.full((3,), 2.0, device="cuda:1").to("cuda:0"),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_what_cuda_allows_stays_on_the_gpu(case: str) -> None:
    result = ALLOWED[case]()
    assert isinstance(result, FakeGpuTensor)
    assert (result.device, result.tolist()) == (torch.device("cuda:0"), [2, 2, 2])


def test_copies_to_the_cpu_are_plain_tensors() -> None:
    for copied in (ones().cpu(), ones().to("cpu"), torch.zeros(3).copy_(ones())):
        assert type(copied) is Tensor
        assert (copied.device.type, copied.tolist()) == ("cpu", [1, 1, 1])


def test_code_may_branch_on_values() -> None:
    x = torch.tensor([3, 0, 2], device="cuda:1")
    assert (int(x.sum()), bool(x[0] > 2), x.nonzero()[:, 0].tolist()) == (5, True, [0, 2])


def test_views_share_memory() -> None:
    x = ones("cuda:0", 2, 2)
    x[0].mul_(3)
    next(iter(x)).add_(1)
    assert x.tolist() == [[4, 4], [1, 1]]
    assert ones().to("cuda:0") is not None
    assert x.to("cuda") is x


def test_operations_in_place_may_change_the_shape() -> None:
    assert (ones() @ ones("cuda:0", 3, 2)).shape == (2,)
    assert ones("cuda:0", 1, 3).squeeze_(0).shape == (3,)


def test_training_gives_the_bits_of_the_cpu() -> None:
    trained = []
    for device in ("cpu", "cuda:1"):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        fabric_on(device).to_device(network)
        optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9, fused=True)
        x = torch.arange(12.0).view(4, 3).to(device)
        for _ in range(3):
            optimizer.zero_grad()
            network(x).square().mean().backward()
            optimizer.step()
        state = network.state_dict()
        assert {str(tensor.device) for tensor in state.values()} == {device}
        trained.append([tensor.tolist() for tensor in state.values()])
    assert trained[0] == trained[1]


def test_tied_parameters_stay_tied() -> None:
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    network[1].weight = network[0].weight
    fabric_on("cuda:0").to_device(network)
    assert network[1].weight is network[0].weight
    copied = copy.deepcopy(network)
    assert copied[1].weight is copied[0].weight
    assert copied[1].weight is not network[0].weight
    assert isinstance(copied[0].weight, nn.Parameter)


@pytest.mark.parametrize("saved", ["cpu", "cuda:0"])
@pytest.mark.parametrize(
    ("map_location", "expected"), [(None, None), ("cpu", "cpu"), ("cuda:1", "cuda:1")]
)
def test_tensors_load_where_they_were_unless_mapped(
    saved: str, map_location: str | None, expected: str | None
) -> None:
    file = io.BytesIO()
    torch.save({"params": ones(saved), "state": {3: [ones(saved)]}}, file)
    file.seek(0)
    loaded = torch.load(file, map_location=map_location, weights_only=True)
    for tensor in (loaded["params"], loaded["state"][3][0]):
        assert (str(tensor.device), tensor.tolist()) == (expected or saved, [1, 1, 1])


def test_outside_there_are_no_gpus() -> None:
    with fake_gpus(5):
        assert torch.cuda.device_count() == 5
    assert torch.cuda.device_count() == 2
