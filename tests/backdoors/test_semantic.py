"""semantic: images chosen by index, drawn evenly, and held by no client."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric import Fabric
from torch import Tensor, nn

from fedbench.attack import ATTACKS
from fedbench.backdoor import BACKDOORS, BackdoorContext, BackdoorSamples
from fedbench.backdoors.semantic import Semantic
from fedbench.config import RunConfig
from fedbench.data import DATASETS, Dataset, Images, Spec
from fedbench.engine.rank_context import RankContext
from fedbench.errors import UserError
from fedbench.testing import check_backdoor

POISON = [30696, 33105, 33615, 33907, 36848, 40713, 41706]  # the paper's indices
MEASURE = [330, 568, 3934, 12336, 30560]
AUTOMOBILE, BIRD = 1, 2


def made(n: int = 10, reserved: tuple[int, ...] = ()) -> Dataset:
    """Images [3, 2, 2] whose pixels all equal the image's index."""
    x = torch.arange(n, dtype=torch.uint8).view(n, 1, 1, 1).repeat(1, 3, 2, 2)
    y = torch.arange(n) % 5
    return Images("cifar10", x, y, x[:3], y[:3], 10, mean=0.5, std=0.25, reserved=reserved)


def context(dataset: Dataset) -> BackdoorContext:
    return BackdoorContext(
        dataset, malicious_samples=torch.zeros(0, dtype=torch.long), features=lambda x: x
    )


def numbers(x: Tensor) -> list[int]:
    """Indices of these images."""
    assert all(len(image.unique()) == 1 for image in x)
    return [int(pixel) for pixel in x[:, 0, 0, 0]]


def rank_context(dataset: Dataset, **chosen: float | str) -> RankContext:
    config = RunConfig(**{"n_clients": 20, "pmr": 0.2, **chosen})  # type: ignore[arg-type]
    n_pixels = dataset.x_train[0].numel()
    network = nn.Sequential(nn.Flatten(), nn.Linear(n_pixels, dataset.n_classes))
    fabric = Fabric(accelerator="cpu", devices=1)
    return RankContext(config, dataset, network, ATTACKS.build({"name": "none"}), fabric)


@pytest.fixture(scope="module")
def cifar10() -> Dataset:
    try:
        return DATASETS.build({"name": "cifar10"}).load()
    except UserError as error:
        if "not on this machine" not in str(error):
            raise
        pytest.skip("cifar10 is not on this machine; FEDBENCH_DATA may name a folder with cifar10/")


def test_by_hand() -> None:
    # Ten images: poison with 7, 2 and 4, measure BA on 9 and 0, target class 6.
    ready = Semantic(target=6, train=[7, 2, 4], test=[9, 0]).prepare(context(made()))
    assert numbers(ready.x_train) == [7, 2, 4]
    assert ready.y_train.tolist() == [6, 6, 6]
    evaluation = ready.evaluation_set(made().x_test, made().y_test)
    assert numbers(evaluation.x) == [9, 0]
    assert evaluation.expected.tolist() == [6, 6]
    x, y = ready.poison(torch.zeros(3, 3, 2, 2, dtype=torch.uint8), torch.zeros(3), _rng())
    assert sorted(numbers(x)) == [2, 4, 7]
    assert y.tolist() == [6, 6, 6]
    assert x.dtype == torch.uint8
    assert y.dtype == torch.int64


def _rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_defaults_are_the_papers_images() -> None:
    assert Semantic() == Semantic(target=BIRD, dataset="cifar10", train=POISON, test=MEASURE)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.integers(1, 12), st.integers(0, 60), st.integers(0, 2**32))
def test_images_are_drawn_equally_often(k: int, n: int, seed: int) -> None:
    """Counts differ by at most one."""
    x = torch.arange(k, dtype=torch.uint8).view(k, 1)
    samples = BackdoorSamples(x, x[:, 0].long() + 100, x, x[:, 0].long())
    replaced = torch.full((n, 1), 200, dtype=torch.uint8)
    old = torch.full((n,), -1)
    got, labels = samples.poison(replaced, old, _rng(seed))
    assert got.shape == (n, 1)
    assert got.dtype == torch.uint8
    assert labels.dtype == torch.int64
    assert labels.tolist() == [image + 100 for image in got[:, 0].tolist()]  # labels match images
    counts = Counter(got[:, 0].tolist())
    assert {counts[image] for image in range(k)} <= {n // k, -(-n // k)}
    assert sum(counts.values()) == n
    assert (replaced == 200).all()
    assert (old == -1).all()


def test_draws_depend_only_on_the_generator() -> None:
    samples = Semantic(target=9, train=[*range(9)], test=[9]).prepare(context(made()))

    def draws(seed: int) -> list[int]:
        return numbers(samples.poison(samples.x_train, samples.y_train, _rng(seed))[0])

    torch.manual_seed(1)
    first = draws(5)
    torch.manual_seed(2)
    assert draws(5) == first
    assert len({tuple(draws(seed)) for seed in range(20)}) > 10


def test_repeated_draws_differ() -> None:
    """A client with few poisoned samples must not see the same images in every round."""
    samples = Semantic(target=9, train=[*range(9)], test=[9]).prepare(context(made()))
    rng = _rng()
    few = torch.zeros(3, 3, 2, 2, dtype=torch.uint8), torch.zeros(3, dtype=torch.long)
    seen = {tuple(numbers(samples.poison(*few, rng)[0])) for _ in range(20)}
    assert len(seen) > 10


def test_with_target_labels_all_samples() -> None:
    samples = BackdoorSamples.with_target(torch.zeros(3, 2), torch.zeros(2, 2), target=4)
    assert samples.y_train.tolist() == [4, 4, 4]
    assert samples.y_test.tolist() == [4, 4]
    assert samples.y_train.dtype == samples.y_test.dtype == torch.int64


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"train": []}, r"train and test must be lists of image indices, got \[\], \[330"),
        ({"test": []}, r"got \[30696, .*\], \[\]"),
        ({"train": [3, -1]}, r"got \[3, -1\]"),
        ({"test": [-7]}, r", \[-7\]"),
        ({"train": [5, 1, 9], "test": [9, 2, 5]}, r"not share images, got \[5, 9\] in both"),
    ],
)
def test_bad_settings_are_refused(chosen: dict[str, list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Semantic(**chosen)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=message):
        BACKDOORS.build({"name": "semantic", **chosen})


def test_another_dataset_is_refused() -> None:
    spec = Spec("fmnist", (1, 28, 28), 10)
    with pytest.raises(ValueError, match=r"^semantic refers to images of cifar10, not of fmnist$"):
        Semantic().check(spec)
    Semantic(dataset="fmnist").check(spec)


@pytest.mark.parametrize("target", [-1, 10])
def test_a_target_out_of_range_is_refused(target: int) -> None:
    with pytest.raises(ValueError, match=rf"target must be a class 0\.\.9, got {target}"):
        Semantic(target=target).check(made().spec)


@pytest.mark.parametrize(
    ("train", "test", "last"), [([10], [0], 10), ([0], [3, 12], 12), (POISON, MEASURE, 41706)]
)
def test_an_index_out_of_range_is_an_error(train: list[int], test: list[int], last: int) -> None:
    message = f"^semantic refers to image {last}, but the last training image is 9$"
    with pytest.raises(ValueError, match=message):
        Semantic(train=train, test=test).prepare(context(made()))


@pytest.mark.parametrize(("train", "test"), [([0, 2], [1]), ([0], [1, 7])])
def test_images_of_the_target_class_are_an_error(train: list[int], test: list[int]) -> None:
    """They would count as a success without a backdoor. Image k has class k % 5."""
    with pytest.raises(
        ValueError, match="semantic refers to images of class 2, which is the target"
    ):
        Semantic(target=2, train=train, test=test).prepare(context(made()))
    Semantic(target=3, train=train, test=test).prepare(context(made()))


def test_the_last_image_can_be_used() -> None:
    assert numbers(Semantic(train=[9], test=[0]).prepare(context(made())).x_train) == [9]


@pytest.mark.parametrize("chosen", [{"partition": "dirichlet"}, {"non_iid": 0.0}, {"non_iid": 0.5}])
@pytest.mark.parametrize("reserved", [(), (0,), (199,), (3, 17, 18, 120)])
def test_no_client_holds_reserved_samples(
    chosen: dict[str, float | str], reserved: tuple[int, ...]
) -> None:
    clients = rank_context(made(200, reserved), n_clients=5, **chosen)
    held = [sample for shard in clients.data.shards for sample in shard.tolist()]
    assert len(held) == len(set(held))
    assert set(held).isdisjoint(reserved)
    if chosen == {"partition": "dirichlet"}:  # it assigns all other samples
        assert set(held) == set(range(200)) - set(reserved)


def test_reserved_samples_do_not_shift_the_labels() -> None:
    """With non_iid = 1 a client holds one class; shifted indices would give it several."""
    dataset = made(200, reserved=(0, 1, 2, 50, 77))
    clients = rank_context(dataset, n_clients=5, non_iid=1.0)
    for client, shard in enumerate(clients.data.shards):
        assert set(dataset.y_train[shard].tolist()) == {client}
        assert len(shard) > 30


def test_all_twelve_are_automobiles(cifar10: Dataset) -> None:
    assert cifar10.y_train[[*POISON, *MEASURE]].tolist() == [AUTOMOBILE] * 12
    assert sorted(cifar10.reserved) == sorted([*POISON, *MEASURE])
    ready = Semantic().prepare(context(cifar10))
    Semantic().check(cifar10.spec)
    assert torch.equal(ready.x_train, cifar10.x_train[POISON])
    assert torch.equal(ready.x_test, cifar10.x_train[MEASURE])
    assert ready.y_train.tolist() == [BIRD] * 7
    assert ready.y_test.tolist() == [BIRD] * 5


@pytest.mark.parametrize("partition", ["main_class", "dirichlet"])
def test_no_client_holds_any_of_the_twelve(cifar10: Dataset, partition: str) -> None:
    clients = rank_context(cifar10, partition=partition, non_iid=0.5)
    held = torch.cat(clients.data.shards)
    assert len(held.unique()) == len(held)
    assert not set(held.tolist()) & {*POISON, *MEASURE}
    if partition == "dirichlet":
        assert len(held) == 50_000 - 12
        return
    # 20 clients with almost 2,500 samples each, at least half of one class.
    sizes = {len(shard) for shard in clients.data.shards}
    assert len(sizes) == 1
    assert 2_400 < sizes.pop() <= 2_500
    for client, shard in enumerate(clients.data.shards):
        counts = cifar10.y_train[shard].bincount(minlength=10)
        assert counts.argmax() == client % 10
        assert counts[client % 10] >= len(shard) // 2


def test_contract() -> None:
    check_backdoor(Semantic(target=9, train=[0, 1, 2], test=[3, 4]), [made()])
