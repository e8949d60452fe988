"""docs/gpus.md: its numbers and commands are those of the code."""

from __future__ import annotations

import re
import shlex

import pytest
from end_to_end import ROOT

from fedbench.composition import compose
from fedbench.engine.executors import ACCELERATORS
from fedbench.models import MODELS
from fedbench.plan import Plan
from fedbench.selfcheck import __main__ as selfcheck
from fedbench.selfcheck.checks import ON_GPU, REORDERED
from fedbench.single_run import LONG

PATH = ROOT / "docs" / "gpus.md"
pytestmark = pytest.mark.skipif(not PATH.exists(), reason="checks a clone, not an installation")


def page() -> str:
    return PATH.read_text("utf-8")


def test_memory_of_the_updates() -> None:
    shapes = {
        "mlp": ((1, 28, 28), 10),
        "resnet18_light": ((3, 32, 32), 10),
        "lstm": ((64,), 50_000),
    }
    for name, (shape, n_classes) in shapes.items():
        network = MODELS.build({"name": name}).build(shape, n_classes)
        p = sum(param.numel() for param in network.parameters())
        (row,) = re.findall(rf"^\| `{name}`.*$", page(), re.MULTILINE)
        *_, found, with_30, with_100, _ = (cell.strip() for cell in row.split("|"))
        assert found == f"{p:,}"
        for n, text in ((30, with_30), (100, with_100)):
            value, unit = text.split()
            expected = 4 * n * p / {"MB": 1e6, "GB": 1e9}[unit]
            assert float(value) == pytest.approx(expected, rel=0.05)


def test_tolerances_and_limits() -> None:
    for line, allowed in (
        ("on a GPU against the CPU | 2e-2", ON_GPU),
        ("all GPUs against one | 2e-2", ON_GPU),
        ("on one GPU | 1e-3", REORDERED),
        ("checkpoints in between | 1e-3", REORDERED),
    ):
        assert line in page()
        assert float(line.rpartition("|")[2]) == allowed
    assert f"({LONG:,} trained labels or more)" in page()


def commands() -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", page(), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", "").splitlines()
    return [shlex.split(line, comments=True)[2:] for line in lines]


def test_commands() -> None:
    for module, *arguments in commands():
        if module == "fedbench.selfcheck":
            assert selfcheck._options(arguments).quick is False
            continue
        assert module == "fedbench"
        own = [a.partition(",")[0] for a in arguments if not a.startswith(("-", "hydra"))]
        Plan.of(compose(own))
    for option in ("--accelerator cpu", "--devices 2", "--quick"):
        assert option.split()[0] in page()
        selfcheck._options(option.split())


def test_every_accelerator_is_explained() -> None:
    for accelerator in ACCELERATORS:
        assert f"`{accelerator}`" in page() or f"accelerator={accelerator}`" in page()
