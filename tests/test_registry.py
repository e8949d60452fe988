"""Registry: plugins by name, imported on first use; every user error is one line."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fedbench import registry
from fedbench.attack import ATTACKS
from fedbench.defense import DEFENSES, Defense
from fedbench.errors import UserError
from fedbench.models import MODELS
from fedbench.registry import Registry, find_plugins

ROOT = Path(__file__).parent.parent
Write = Callable[[str, str], None]


@dataclass(frozen=True)
class Sieve:
    """A plugin with a setting of each type, and a range."""

    holes: int = 3
    width: float = 0.5
    label: str = "a"
    sizes: list[int] = field(default_factory=lambda: [1, 2])
    inner: dict[str, Any] = field(default_factory=dict)
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.holes < 1:
            raise ValueError(f"holes must be at least 1, got {self.holes}")


@pytest.fixture
def sieves() -> Registry[Any]:
    """Return a registry whose home is a module: this one."""
    registry: Registry[Any] = Registry("sieve", __name__)
    registry.register("fine")(Sieve)
    return registry


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write files where Python looks for modules and distributions."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, "utf-8")
        importlib.invalidate_caches()

    yield write
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def shelf(write: Write) -> Registry[Any]:
    """Return a registry whose home is a package of three files, one of them a helper."""
    write("shelf/__init__.py", "from fedbench.registry import Registry\nSHELF = None\n")
    for name in ("jar", "bowl"):
        write(
            f"shelf/{name}.py",
            "import dataclasses, shelf\n"
            f"@shelf.SHELF.register({name!r})\n"
            "@dataclasses.dataclass(frozen=True)\n"
            f"class {name.title()}:\n"
            "    size: int = 1\n",
        )
    write("shelf/_helper.py", "raise RuntimeError('a helper is not a plugin')\n")
    registry: Registry[Any] = Registry("vessel", "shelf")
    importlib.import_module("shelf").SHELF = registry  # type: ignore[attr-defined]
    return registry


def distribution(write: Write, kind: str, name: str, text: str, package: str = "outside") -> None:
    """Install `package`.py with an entry point for the plugin `name`."""
    write(f"{package}.py", text)
    write(f"{package}-1.0.dist-info/METADATA", f"Name: {package}\nVersion: 1.0\n")
    write(
        f"{package}-1.0.dist-info/entry_points.txt", f"[fedbench.{kind}s]\n{name} = {package}:It\n"
    )


def defense_source(name: str) -> str:
    return (
        "import dataclasses\n"
        "from fedbench.defense import DEFENSES, Defense, mean_of\n"
        f"@DEFENSES.register({name!r})\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class It(Defense):\n"
        "    strength: float = 0.5\n"
        "    def aggregate(self, updates, state, view):\n"
        "        return mean_of(updates, updates[:, 0] > self.strength), state\n"
    )


@pytest.fixture
def defenses(monkeypatch: pytest.MonkeyPatch) -> Registry[Any]:
    """Return the real registry; plugins registered by a test are removed afterwards."""
    monkeypatch.setattr(DEFENSES, "_classes", dict(DEFENSES._classes))
    return DEFENSES


def error_of(build: Callable[[], object]) -> str:
    """Return the message of the UserError, which must be one line."""
    with pytest.raises(UserError) as caught:
        build()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_plugin_is_imported_on_first_use(shelf: Registry[Any]) -> None:
    assert shelf.names() == ["bowl", "jar"]
    assert "shelf.jar" not in sys.modules
    assert shelf.get("jar").__name__ == "Jar"
    assert "shelf.jar" in sys.modules
    assert "shelf.bowl" not in sys.modules
    assert shelf.get("jar") is shelf.get("jar")
    assert shelf.names() == ["bowl", "jar"]


def test_importing_fedbench_imports_no_defense_or_attack() -> None:
    code = (
        "import sys\n"
        "import fedbench.single_run\n"
        "from fedbench.defense import DEFENSES\n"
        "from fedbench.attack import ATTACKS\n"
        "assert {'fedavg', 'krum', 'median'} <= set(DEFENSES.names())\n"
        "assert {'none', 'constrain_and_scale'} <= set(ATTACKS.names())\n"
        "def loaded():\n"
        "    homes = ('fedbench.defenses.', 'fedbench.attacks.')\n"
        "    return sorted(name for name in sys.modules if name.startswith(homes))\n"
        "assert loaded() == [], loaded()\n"
        "DEFENSES.build({'name': 'krum'})\n"
        "assert loaded() == ['fedbench.defenses.krum'], loaded()\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_a_helper_module_is_not_a_plugin(shelf: Registry[Any]) -> None:
    assert "'_helper'" in error_of(lambda: shelf.get("_helper"))


def test_an_unknown_name_suggests_the_nearest(shelf: Registry[Any]) -> None:
    assert error_of(lambda: shelf.build({"name": "jarr"})) == (
        "no vessel is called 'jarr'; did you mean jar? (known: bowl, jar)"
    )
    assert (
        error_of(lambda: shelf.get("kettle")) == "no vessel is called 'kettle' (known: bowl, jar)"
    )
    assert "did you mean krum?" in error_of(lambda: DEFENSES.build({"name": "Krum"}))
    assert "did you mean mlp?" in error_of(lambda: MODELS.build({"name": "mpl"}))


@pytest.mark.parametrize("name", ["", "../krum", "krum.py", "__init__", "a.b"])
def test_a_path_is_not_a_name(name: str) -> None:
    assert repr(name) in error_of(lambda: DEFENSES.build({"name": name}))


def test_a_name_is_required() -> None:
    for settings in ({}, {"name": None}):
        assert error_of(lambda settings=settings: DEFENSES.build(settings)).startswith(
            "defense has no name; its config must say `name: ...` (known: afa, "
        )


@pytest.mark.parametrize("name", [3, True, ["krum"], {"krum": 1}])
def test_a_name_is_a_string(name: object) -> None:
    assert str(name) in error_of(lambda: DEFENSES.build({"name": name}))


def test_settings_reach_the_plugin(sieves: Registry[Any]) -> None:
    assert sieves.build({"name": "fine"}) == Sieve()
    settings = {"holes": 7, "width": 2, "label": "b", "sizes": [5], "inner": {"x": 1}, "limit": 4}
    built = sieves.build({"name": "fine", **settings})
    assert built == Sieve(7, 2.0, "b", [5], {"x": 1}, 4)
    assert type(built.sizes) is list
    assert type(built.inner) is dict
    assert isinstance(built.width, float)


def test_build_does_not_change_its_argument(sieves: Registry[Any]) -> None:
    settings = {"name": "fine", "holes": 2}
    sieves.build(settings)
    assert settings == {"name": "fine", "holes": 2}


def test_an_unknown_setting_suggests_the_nearest(sieves: Registry[Any]) -> None:
    message = error_of(lambda: sieves.build({"name": "fine", "hole": 2}))
    assert message.startswith("sieve fine has no setting 'hole'; did you mean holes? (known: ")
    assert "(known: f, m)" in error_of(lambda: DEFENSES.build({"name": "krum", "zz": 1}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("holes", "many"),
        ("holes", 1.5),
        ("holes", True),
        ("holes", None),
        ("holes", [1]),
        ("width", "wide"),
        ("sizes", 3),
        ("limit", "none"),
    ],
)
def test_a_wrong_type_is_a_user_error(sieves: Registry[Any], key: str, value: object) -> None:
    message = error_of(lambda: sieves.build({"name": "fine", key: value}))
    assert message.startswith(f"sieve.{key}={value}: ")


@pytest.mark.parametrize(
    ("registry", "settings", "key", "value"),
    [
        (MODELS, {"name": "mlp", "hidden": [1, "wide"]}, "model.hidden", "wide"),
        (ATTACKS, {"name": "none", "backdoors": {"a": 1}}, "attack.backdoors", "{'a': 1}"),
    ],
)
def test_a_wrong_type_inside_a_setting_is_a_user_error(
    registry: Registry[Any], settings: dict[str, Any], key: str, value: str
) -> None:
    message = error_of(lambda: registry.build(settings))
    assert message.startswith(key)
    assert value in message
    assert "=None" not in message


def test_a_value_out_of_range_is_a_user_error(sieves: Registry[Any]) -> None:
    message = error_of(lambda: sieves.build({"name": "fine", "holes": 0}))
    assert message == "sieve fine: holes must be at least 1, got 0"
    message = error_of(lambda: DEFENSES.build({"name": "krum", "f": -1}))
    assert message == "defense krum: f must be 0 or more, got -1"


def made(name: str, module: str) -> type:
    return type(name, (), {"__module__": module})


def test_a_name_is_registered_once(sieves: Registry[Any]) -> None:
    with pytest.raises(ValueError, match=r"two sieves are called fine: .*Sieve.*Other"):
        sieves.register("fine")(made("Other", "elsewhere"))
    assert sieves.get("fine") is Sieve


def test_a_name_is_registered_once_even_for_namesake_classes(
    sieves: Registry[Any],
) -> None:
    with pytest.raises(ValueError, match="two sieves are called fine"):
        sieves.register("fine")(made("Sieve", "elsewhere"))


def test_a_module_may_be_reloaded(sieves: Registry[Any]) -> None:
    again = made("Sieve", __name__)
    sieves.register("fine")(again)
    assert sieves.get("fine") is again


def test_distributions_are_read_once_until_one_is_added(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    read = mock.Mock(wraps=registry.entry_points)
    monkeypatch.setattr(registry, "entry_points", read)
    for _ in range(3):
        assert "net" not in find_plugins("defense")
    assert read.call_count == 1
    distribution(write, "defense", "net", defense_source("net"))
    for _ in range(3):
        assert find_plugins("defense")["net"].value == "outside:It"
    assert read.call_count == 2


def test_an_entry_point_is_found(write: Write, defenses: Registry[Any]) -> None:
    assert "net" not in defenses.names()
    distribution(write, "defense", "net", defense_source("net"))
    assert "net" in defenses.names()
    assert "outside" not in sys.modules
    assert "did you mean net?" in error_of(lambda: defenses.get("nett"))
    assert "outside" not in sys.modules
    assert defenses.get("net").__module__ == "outside"
    built = defenses.build({"name": "net", "strength": 0.25})
    assert built.strength == 0.25
    assert "no setting 'strngth'; did you mean strength?" in error_of(
        lambda: defenses.build({"name": "net", "strngth": 1})
    )
    assert defenses.names().count("net") == 1


def test_an_entry_point_of_another_kind_is_not_found(write: Write, defenses: Registry[Any]) -> None:
    distribution(write, "attack", "net", defense_source("net"))
    assert "net" not in defenses.names()
    assert "net" in ATTACKS.names()


def test_an_entry_point_works_where_home_is_a_module(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODELS, "_classes", dict(MODELS._classes))
    distribution(
        write,
        "model",
        "wide",
        "import dataclasses\n"
        "from fedbench.models import MODELS, MLP\n"
        "@MODELS.register('wide')\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class It(MLP):\n"
        "    pass\n",
    )
    assert "wide" in MODELS.names()
    assert MODELS.build({"name": "wide", "hidden": [9]}).hidden == [9]  # type: ignore[attr-defined]


def test_an_entry_point_does_not_replace_a_file(
    write: Write, defenses: Registry[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`krum` is fedbench's Krum or an error, never another defense."""
    distribution(write, "defense", "krum", defense_source("krum"))
    monkeypatch.setattr(defenses, "_classes", {})
    monkeypatch.delitem(sys.modules, "fedbench.defenses.krum", raising=False)
    try:
        found = defenses.get("krum")
    except (UserError, ValueError) as error:
        assert "krum" in str(error)  # noqa: PT017
    else:
        assert found.__module__ == "fedbench.defenses.krum"


def test_an_entry_point_that_registers_nothing_is_a_user_error(
    write: Write, defenses: Registry[Any]
) -> None:
    """The message must not be `no defense is called net; did you mean net?`."""
    distribution(write, "defense", "net", "class It:\n    pass\n")
    for _ in range(2):
        assert error_of(lambda: defenses.get("net")).endswith(
            '/outside.py: registers no defense; write @DEFENSES.register("net")'
        )


def test_a_plugin_that_registers_other_names_is_a_user_error(
    shelf: Registry[Any], write: Write, tmp_path: Path
) -> None:
    text = (tmp_path / "shelf" / "jar.py").read_text()
    write("shelf/pot.py", text.replace("jar", "pan") + text.replace("jar", "lid"))
    for _ in range(2):
        assert error_of(lambda: shelf.get("pot")) == (
            f'{tmp_path}/shelf/pot.py: registers pan, lid, not pot; write @VESSELS.register("pot")'
        )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import os\n\ndef (:\n", "SyntaxError: invalid syntax ({file}:3)"),
        ("\nimport nowhere\n", "ModuleNotFoundError: No module named 'nowhere' ({file}:2)"),
        ("import json\njson.loads('a\\nb')\n", "JSONDecodeError: {...} ({file}:2)"),
        ("{jar}raise RuntimeError\n", "RuntimeError ({file}:6)"),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_a_user_error(
    shelf: Registry[Any], write: Write, tmp_path: Path, text: str, reason: str
) -> None:
    jar = (tmp_path / "shelf" / "jar.py").read_text()
    write("shelf/pot.py", text.replace("{jar}", jar.replace("jar", "pot")))
    for _ in range(2):  # what the file registered before it failed does not count
        message = error_of(lambda: shelf.get("pot"))
        expected = reason.replace("{file}", f"{tmp_path}/shelf/pot.py")
        start, _, end = expected.partition("{...}")
        assert message.startswith(f"vessel pot: {start}")
        assert message.endswith(f"{end}; FEDBENCH_TRACEBACK=1 shows the traceback")
    assert shelf.get("jar").__name__ == "Jar"


def test_a_plugin_without_a_required_method_is_a_user_error() -> None:
    registry: Registry[Any] = Registry("defense", __name__)
    registry.register("half_done")(dataclass(frozen=True)(type("HalfDone", (Defense,), {})))
    message = error_of(lambda: registry.build({"name": "half_done"}))
    assert message == "defense half_done: HalfDone must define aggregate"
