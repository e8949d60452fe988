"""Wheel, sdist and bare clone: each is complete and runs anywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from end_to_end import ROOT, TIMEOUT, environment, files, run_folder, succeed
from pages import write_titled_blocks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs git's list of files"),
]

PACKAGES = {name: f"fedbench/{name}" for name in ("attacks", "backdoors", "conf", "defenses")}
CALL_KRUM = (
    "import fedbench; from fedbench.defenses import krum; "
    "print(fedbench.aggregate(krum.Krum(), [[1.0], [2.0], [2.0], [9.0]]).accepted.tolist())"
)
DATA = (".yaml", ".gz", ".txt", ".typed", ".xz", ".html", ".css", ".js")


def python(*arguments: str, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment(env),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def tree() -> list[str]:
    """Return the files of the project: tracked by git, or not ignored."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in names.splitlines() if (ROOT / name).is_file()]


def clone(target: Path) -> Path:
    for name in tree():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target / name)
    return target


def build(kind: str, source: Path, out: Path) -> Path:
    python("-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(out), cwd=source)
    (made,) = (path for path in out.iterdir() if path.suffix == {"wheel": ".whl"}.get(kind, ".gz"))
    return made


def members(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(name for name in archive.namelist() if not name.endswith("/"))


def in_package(name: str) -> str:
    """Return the path in the wheel of a file of the tree."""
    top, _, rest = name.partition("/")
    return f"{PACKAGES.get(top, top)}/{rest}"


def where(module: str) -> str:
    return f"import importlib.util as u; s = u.find_spec({module!r}); print(s and s.origin)"


def test_an_installed_wheel_is_complete_and_runs(tmp_path: Path) -> None:
    source = clone(tmp_path / "source")
    wheel = build("wheel", source, tmp_path / "from_tree")
    sdist = build("sdist", clone(tmp_path / "another"), tmp_path / "sdist")

    shipped = {
        in_package(name)
        for name in tree()
        if name.split("/")[0] in ("fedbench", *PACKAGES)
        and name.endswith((".py", "LICENSE", "README.md", *DATA))
    }
    assert {"fedbench/conf/config.yaml", "fedbench/conf/defense/krum.yaml"} < shipped
    assert "fedbench/assets/fmnist_sample/LICENSE" in shipped
    inside = {name for name in members(wheel) if ".dist-info/" not in name}
    assert inside == shipped
    licenses = [name for name in members(wheel) if "/licenses/" in name]
    assert len(licenses) == 2, licenses

    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    again = build("wheel", unpacked, tmp_path / "from_sdist")
    assert again.name == wheel.name
    assert members(again) == members(wheel)

    site = tmp_path / "site"
    target = ["--target", str(site), "--no-deps", "--no-index", "--no-compile"]
    python("-m", "pip", "install", "-q", *target, str(wheel), cwd=tmp_path)
    metadata = f"fedbench-{wheel.name.split('-')[1]}.dist-info"
    assert sorted(os.listdir(site)) == ["bin", "fedbench", metadata]
    assert os.listdir(site / "bin") == ["fedbench"]

    away = tmp_path / "away"
    away.mkdir()
    env = {"PYTHONPATH": str(site)}
    found = python("-c", "import fedbench; print(fedbench.__file__)", cwd=away, env=env)
    assert Path(found.strip()) == site / "fedbench" / "__init__.py"
    for name in PACKAGES:
        assert python("-c", where(name), cwd=away, env=env).strip() == "None"
        inner = python("-c", where(f"fedbench.{name}"), cwd=away, env=env).strip()
        assert inner.startswith(f"{site}/fedbench/{name}")
    before = [name for name in files(site) if "__pycache__" not in name]
    assert python("-c", CALL_KRUM, cwd=away, env=env) == "[False, True, False, False]\n"
    succeed("defense=krum", "rounds=1", cwd=away, env=env)
    assert os.listdir(away) == ["runs"]
    assert run_folder(away / "runs").name.startswith("krum-")

    three = tmp_path / "three"  # a model, a data set and a defense of the user's
    for page in ("own-model", "own-dataset", "adding-a-defense"):
        write_titled_blocks(ROOT / "docs" / f"{page}.md", three)
    model = ("model=custom", "model.target=nets/my_net.py:Net", "model.arguments.width=8")
    data = ("dataset=custom", "dataset.source=digits.py:load", "n_clients=4", "rounds=1")
    succeed(*model, *data, "defense=short_only", cwd=three, env=env)
    assert run_folder(three / "runs").name.startswith("short_only-")
    assert [name for name in files(site) if "__pycache__" not in name] == before

    script = [str(site / "bin" / "fedbench"), "defense=krumm"]
    failed = subprocess.run(
        script, cwd=away, env=environment(env), capture_output=True, text=True, timeout=TIMEOUT
    )
    assert failed.returncode == 1
    assert "did you mean krum?" in failed.stderr


def test_a_bare_clone_runs_from_its_root(tmp_path: Path) -> None:
    copy = clone(tmp_path / "clone")
    nothing = {"PYTHONPATH": ""}
    found = python("-c", "import fedbench; print(fedbench.__file__)", cwd=copy, env=nothing)
    assert Path(found.strip()) == copy / "fedbench" / "__init__.py"
    assert python("-c", CALL_KRUM, cwd=copy, env=nothing) == "[False, True, False, False]\n"
    succeed("defense=krum", "rounds=1", cwd=copy, env=nothing)
    assert run_folder(copy / "runs").name.startswith("krum-")
    new = {name.split("/")[0] for name in files(copy) if "__pycache__" not in name}
    assert new - {name.split("/")[0] for name in tree()} == {"runs"}
