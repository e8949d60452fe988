"""Hostile answers of plugins: every method, every kind of answer, every position in it.

Each try is a round of a small federation. The answer must be refused in one line that names the
plugin, or the round must end with a finite model and a state that a checkpoint holds.
"""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from fedbench.attack import Attack, AttackView, Poisoning
from fedbench.config import RunConfig
from fedbench.data import DATASETS, Dataset
from fedbench.defense import DEFENSES, Aggregate, Defense, ServerView, mean_of
from fedbench.engine.executors import Sequential
from fedbench.engine.flat_parameters import FlatModel
from fedbench.engine.rank_context import RankContext
from fedbench.engine.ranks import RankGroup
from fedbench.errors import UserError
from fedbench.federation import Federation
from fedbench.results.checkpoint import Checkpoint
from fedbench.testing.verify import verify_state
from tests.soak.outcome import Outcome

TIMES = 700
ATTACK_METHODS = ("poison", "objective", "craft", "collude")
FIELDS = tuple(field.name for field in fields(Aggregate))
DEFENSE_METHODS = ("init", "state", "aggregate", *FIELDS)

Change = Callable[[Any], Any]  # what a correct plugin returns -> what the hostile one returns


def tensors(change: Callable[[Tensor], Any]) -> Change:
    """Change each tensor of an answer."""

    def changed(answer: Any) -> Any:
        if isinstance(answer, Tensor):
            return change(answer)
        if type(answer) in (list, tuple):
            return type(answer)(map(changed, answer))
        if type(answer) is dict:
            return {key: changed(value) for key, value in answer.items()}
        return answer

    return changed


def itself_inside(answer: Any) -> list[Any]:
    answers = [answer]
    answers.append(answers)
    return answers


CHANGES: dict[str, Change] = {
    "None": lambda answer: None,
    "text": lambda answer: "update",
    "a number": lambda answer: 0.5,
    "NaN": lambda answer: float("nan"),
    "True": lambda answer: True,
    "a class": lambda answer: Tensor,
    "an object": lambda answer: object(),
    "a function": lambda answer: lambda: answer,
    "a generator": lambda answer: (part for part in [answer]),
    "a set": lambda answer: {1, 2},
    "a dict": lambda answer: {(1, 2): answer},
    "empty": lambda answer: [],
    "in a list": lambda answer: [answer],
    "in a tuple": lambda answer: (answer,),
    "a triple": lambda answer: (answer, answer, answer),
    "an Aggregate": lambda answer: Aggregate(torch.zeros(1), torch.zeros(1)),
    "itself inside": itself_inside,
    "lists": tensors(lambda t: t.tolist()),
    "numpy": tensors(lambda t: t.detach().numpy()),
    "numpy numbers": tensors(lambda t: np.float64(0.5)),
    "sparse": tensors(lambda t: t.detach().to_sparse()),
    "meta": tensors(lambda t: t.detach().to("meta")),
    "nested": tensors(lambda t: torch.nested.nested_tensor([t.detach(), t.detach()])),
    "quantized": tensors(
        lambda t: torch.quantize_per_tensor(t.detach().float(), 0.1, 0, torch.qint8)
    ),
    "a Parameter": tensors(lambda t: nn.Parameter(t.detach().float())),
    "with gradient": tensors(lambda t: t.detach().float().requires_grad_() * 1),
    "int64": tensors(lambda t: t.detach().long()),
    "uint8": tensors(lambda t: t.detach().to(torch.uint8)),
    "bool": tensors(lambda t: t.detach() > 0),
    "complex": tensors(lambda t: t.detach() * 1j),
    "float64": tensors(lambda t: t.detach().double()),
    "float16": tensors(lambda t: t.detach().half()),
    "float8": tensors(lambda t: t.detach().to(torch.float8_e4m3fn)),
    "expanded": tensors(lambda t: t.detach().reshape(-1)[:1].expand(t.numel()).view(t.shape)),
    "the same memory": tensors(lambda t: t),
    "a scalar": tensors(lambda t: torch.tensor(0.5)),
    "one too long": tensors(lambda t: torch.cat([t.detach().reshape(-1), torch.zeros(1)])),
    "one more axis": tensors(lambda t: t.detach()[None]),
    "no elements": tensors(lambda t: t.detach().reshape(-1)[:0]),
    "all NaN": tensors(lambda t: t.detach().float() * torch.nan),
    "all infinite": tensors(lambda t: torch.full_like(t.detach().float(), torch.inf)),
    "all 3e38": tensors(lambda t: torch.full_like(t.detach().float(), 3e38)),
    "all -1": tensors(lambda t: torch.full_like(t.detach().float(), -1)),
    "all 1e300": tensors(lambda t: torch.full_like(t.detach().double(), 1e300)),
}


@dataclass(frozen=True)
class Correct(Defense):
    """Averages, with an answer in every field."""

    def init(self) -> Any:
        return {"seen": torch.zeros(3)}

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> Any:
        scores = updates.norm(dim=1)
        result = mean_of(updates, torch.ones(len(updates), dtype=torch.bool), scores, 3.4e38)
        return replace(result, details={"norm": scores}), {"seen": torch.ones(3)}


@dataclass(frozen=True)
class HostileDefense(Correct):
    """Changes one part of its answers."""

    where: str = "aggregate"
    change: Any = None

    def init(self) -> Any:
        return self.change(super().init()) if self.where == "init" else super().init()

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> Any:
        result, after = super().aggregate(updates, state, view)
        if self.where in FIELDS:
            return replace(result, **{self.where: self.change(getattr(result, self.where))}), after
        if self.where == "state":
            return result, self.change(after)
        return self.change((result, after)) if self.where == "aggregate" else (result, after)


@dataclass(frozen=True)
class HostileAttack(Attack):
    """Changes what one of its methods returns."""

    where: str = "craft"
    change: Any = None

    def _sent(self, method: str, answer: Any) -> Any:
        return self.change(answer) if method == self.where else answer

    def poison(self, x: Tensor, y: Tensor, poisoning: Poisoning) -> Any:
        return self._sent("poison", (x.clone(), y.clone()))

    def objective(self, loss: Tensor, params: Sequence[Tensor], view: AttackView) -> Any:
        return self._sent("objective", 2 * loss)

    def craft(self, update: Tensor, view: AttackView) -> Any:
        return self._sent("craft", 2 * update)

    def collude(self, updates: Tensor, view: AttackView) -> Any:
        return self._sent("collude", 2 * updates)


@cache
def data() -> Dataset:
    """Return 60 training and 20 test images of `fmnist_sample`."""
    whole = DATASETS.build({"name": "fmnist_sample"}).load()
    train, test = (whole.x_train[:60], whole.y_train[:60]), (whole.x_test[:20], whole.y_test[:20])
    return replace(whole, x_train=train[0], y_train=train[1], x_test=test[0], y_test=test[1])


@cache
def context() -> tuple[RankContext, FlatModel]:
    """Return clients and network, and the model as initialized."""
    config = RunConfig(n_clients=6, pmr=0.34, local_epochs=1, batch_size=16, pretrain_rounds=0)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    fabric = Fabric(accelerator="cpu", devices=1)
    built = RankContext(config, data(), network, HostileAttack(), fabric)
    layout = built.replica.layout
    return built, FlatModel(layout.read_params(), layout.read_buffers())


def federation(defense: Defense, attack: Attack) -> Federation:
    """Return a federation with these plugins; all tries share clients and network."""
    shared, initial = context()
    shared.attack = shared.data.attack = attack
    shared.replica.layout.write(*initial)
    return Federation(RankGroup(Sequential(), shared), defense)


def problem_of(state: Checkpoint) -> str | None:
    """What is wrong with the state after a round; None if a checkpoint can hold it."""
    for name in ("params", "buffers"):
        if not bool(getattr(state, name).isfinite().all()):
            return f"the global {name} are not finite"
    file = io.BytesIO()
    torch.save(vars(state), file)
    file.seek(0)
    torch.load(file, weights_only=True)
    try:
        verify_state(state.defense_state)
    except AssertionError as error:
        return str(error)
    return None


def problem_after(server: Federation, rounds: int) -> str | None:
    """Run rounds; return the first problem."""
    state, problem = server.initial(), None
    for _ in range(rounds):
        state, _ = server.round(state)
        problem = problem or problem_of(state)
    return problem


def tried(what: str, defense: Defense, attack: Attack, rounds: int = 1) -> Outcome:
    """Run rounds with a hostile plugin; the answer is refused in one line, or valid."""
    try:
        with warnings.catch_warnings(action="ignore"):  # torch's, about nested and other tensors
            problem = problem_after(federation(defense, attack), rounds)
    except UserError as error:
        line = str(error)
        if "\n" in line or "Hostile" not in line:
            return Outcome("refused, but unclear", f"{what}: {line}")
        return Outcome("refused in one line")
    except Exception as error:
        return Outcome("traceback", f"{what}: {type(error).__name__}: {error}")
    if problem is not None:
        return Outcome("accepted, but harmful", f"{what}: {problem}")
    return Outcome("accepted as valid")


def answers() -> list[tuple[str, str]]:
    """Every method with every kind of answer."""
    return [(where, kind) for where in (*DEFENSE_METHODS, *ATTACK_METHODS) for kind in CHANGES]


def soak(times: int, seed: int) -> Iterator[Outcome]:
    """Hostile answers in random order, each beside a random defense or attack that is correct."""
    rng = random.Random(seed)
    waiting: list[tuple[str, str]] = []
    for _ in range(times):
        waiting = waiting or rng.sample(answers(), len(answers()))
        where, kind = waiting.pop()
        what = f"{where} returns {kind}"
        if where in ATTACK_METHODS:
            name = rng.choice(DEFENSES.names())
            defense: Defense = DEFENSES.build({"name": name})
            attack = HostileAttack(where, CHANGES[kind])
            yield tried(f"{what}, defense={name}", defense, attack, rounds=2)
        else:
            defense = HostileDefense(where, CHANGES[kind])
            yield tried(what, defense, HostileAttack("none"))
