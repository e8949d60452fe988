"""fedbench.datasets.reddit: windows and owners by hand and against a slow oracle; bad dumps."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import lzma
import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pooch  # type: ignore[import-untyped]
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedbench.backdoor import BACKDOORS, BackdoorContext
from fedbench.config import RunConfig, rounded_count
from fedbench.data import DATASETS, Kind, Sequences, Spec
from fedbench.datasets import reddit_dumps
from fedbench.datasets.files import ASSETS
from fedbench.datasets.reddit import Reddit, RedditSample
from fedbench.datasets.reddit_dumps import tokenize
from fedbench.errors import UserError
from fedbench.metrics import IGNORED
from fedbench.models import MODELS
from fedbench.run_ids import run_id

UNK, EOS = 0, 1
Post = tuple[str, str]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder and cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDBENCH_DATA", raising=False)
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / "cache" / project)
    return tmp_path


def write(path: Path, posts: Iterable[Post]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"author": author, "body": body}) + "\n" for author, body in posts]
    path.write_text("".join(lines), "utf-8")
    return path


def load(path: Path | None, **fields: Any) -> Sequences:
    small = {"words": 20, "length": 3, "min_posts": 2, "max_posts": 50}
    return Reddit(path=None if path is None else str(path), **{**small, **fields}).load()


def message(call: Callable[..., Any], *args: Any, **fields: Any) -> str:
    """Return the message of the UserError: one line."""
    with pytest.raises(UserError) as caught:
        call(*args, **fields)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    return text


def test_by_hand(alone: Path) -> None:
    # Counts: a 5, b 3, c and d 2 each (alphabetical), e 1. Five ids: <unk>, <eos>, a, b, c.
    # ann's stream: a b <eos> | d a c <eos> | d a <eos> ; bob's: a e <eos> | a b <eos> | c b <eos>
    # The last post of each is a test post. Windows of 3 + 1 words start at every third word:
    #   ann  2 3 1 0 | 0 2 4 1            bob  2 0 1 2; the remaining 2 3 1 is too short
    #   test 0 2 1 4 (d a <eos> c); the remaining 4 3 1 is too short
    posts = [
        *(("ann", "A b"), ("bob", "a, e"), ("ann", "d a c"), ("bob", "a b!"), ("cem", "...")),
        *(("ann", "d a"), ("bob", "c b")),
    ]
    data = load(write(alone / "RC", posts), words=5, test_rate=0.1)
    assert data.vocabulary == {"<unk>": 0, "<eos>": 1, "a": 2, "b": 3, "c": 4}
    windows = {"ann": [[2, 3, 1, 0], [0, 2, 4, 1]], "bob": [[2, 0, 1, 2]]}
    assert data.owners is not None
    order = ["ann", "bob"] if data.owners.tolist() == [0, 0, 1] else ["bob", "ann"]
    train = [window for author in order for window in windows[author]]
    assert data.owners.tolist() == [i for i, a in enumerate(order) for _ in windows[a]]
    test = [0, 2, 1, 4] if order[0] == "ann" else [4, 3, 1, 0]
    for x, y, expected in (
        (data.x_train, data.y_train, train),
        (data.x_test, data.y_test, [test]),
    ):
        assert x.dtype == y.dtype == torch.int32
        assert x.tolist() == [window[:-1] for window in expected]
        assert y.tolist() == [[w or IGNORED for w in window[1:]] for window in expected]
    assert data.owners.dtype == torch.int32
    assert data.spec == Spec("reddit", (3,), 5, Kind.SEQUENCES, natural=True)


def test_ties_and_vocabulary_by_hand(alone: Path) -> None:
    data = load(write(alone / "RC", [("ann", "z y x z y x w w w")] * 3), words=4)
    assert data.vocabulary == {"<unk>": 0, "<eos>": 1, "w": 2, "x": 3}


def slowly(posts: Sequence[Post], source: Reddit) -> tuple[Any, ...]:
    """Follow the module's docstring literally."""
    usable = [(author, tokenize(body)) for author, body in posts]
    usable = [(author, words) for author, words in usable if words]
    counts = Counter(word for _, words in usable for word in words)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[: source.words - 2]
    ids = {word: i + 2 for i, word in enumerate(ranked)}
    by_author: dict[str, list[list[str]]] = {}
    for author, words in usable:
        by_author.setdefault(author, []).append(words)
    names = [a for a, p in by_author.items() if source.min_posts <= len(p) <= source.max_posts]
    names.sort(key=lambda name: hashlib.blake2b(name.encode(), digest_size=8).digest())
    train, owners, tests = [], [], []
    for name in names[: source.max_authors]:
        own = by_author[name]
        n_test = min(max(rounded_count(source.test_rate, len(own)), 1), len(own) - 1)
        parts: list[list[int]] = []
        for part in (own[:-n_test], own[-n_test:]):
            parts.append([i for words in part for i in [*(ids.get(w, 0) for w in words), 1]])
        found = cut(parts[0], source.length)
        if found:
            train += found
            owners += [len(set(owners))] * len(found)
            tests += parts[1]
    windows = cut(tests, source.length)
    if len(windows) > source.test_windows:
        k = source.test_windows
        windows = [windows[i * len(windows) // k] for i in range(k)]
    return train, owners, windows


def cut(stream: list[int], length: int) -> list[list[int]]:
    windows = []
    while len(stream) > length:
        windows.append(stream[: length + 1])
        stream = stream[length:]
    return windows


@settings(
    derandomize=True,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ann", "bob", "cem", "d\u00e9", "e"]),
            st.lists(
                st.sampled_from(["a", "b", "c", "d", "e", "f", "don't", "17", "\u00e9"]), max_size=9
            ).map(" ".join),
        ),
        min_size=20,
        max_size=60,
    ),
    st.fixed_dictionaries(
        {
            "words": st.integers(3, 14),
            "length": st.integers(1, 5),
            "min_posts": st.integers(2, 6),
            "max_posts": st.integers(6, 20),
            "max_authors": st.none() | st.integers(1, 4),
            "test_rate": st.floats(0.01, 0.99),
            "test_windows": st.integers(1, 9),
        }
    ),
    st.integers(0, 2**32),
)
def test_windows_match_the_slow_oracle(
    alone: Path, posts: list[Post], fields: dict[str, Any], number: int
) -> None:
    path = write(alone / f"RC_{number}", posts)
    source = Reddit(path=str(path), **fields)
    train, owners, test = slowly(posts, source)
    if not train or not test:
        message(source.load)
        return
    data = source.load()
    assert data.owners is not None
    assert data.owners.tolist() == owners
    for x, y, expected in ((data.x_train, data.y_train, train), (data.x_test, data.y_test, test)):
        assert x.tolist() == [window[:-1] for window in expected]
        assert y.tolist() == [[w or IGNORED for w in window[1:]] for window in expected]


def test_lossy_counts_find_the_same_authors(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1000 authors post once, 20 post 5 to 24 times: a counter for 400 is enough."""
    rng = random.Random(0)
    posts = [(f"once{i}", "a b c") for i in range(1000)]
    posts += [(f"often{i}", f"a b {i}") for i in range(20) for _ in range(5 + i)]
    rng.shuffle(posts)
    path = write(alone / "RC", posts)
    fields: dict[str, Any] = {"min_posts": 12, "max_posts": 19, "words": 9}
    for max_authors in (None, 3):
        exact = load(path, max_authors=max_authors, **fields)
        with monkeypatch.context() as patch:
            patch.setattr(reddit_dumps, "MAX_AUTHORS", 400)
            patch.setattr(reddit_dumps, "BLOCK", 1000)
            statistics = reddit_dumps.scan_dumps([path], lambda n: None)
            assert 0 < statistics.authors.error < 12
            assert len(statistics.authors.counts) <= 400
            shutil.rmtree(alone / "cache")
            pruned = load(path, max_authors=max_authors, **fields)
        assert torch.equal(exact.x_train, pruned.x_train)
        assert exact.owners is not None
        assert pruned.owners is not None
        assert torch.equal(exact.owners, pruned.owners)
        assert int(exact.owners.max()) + 1 == (max_authors or 8)


def test_max_authors_selects_the_first(alone: Path) -> None:
    path = write(alone / "RC", [(f"author{i % 9}", f"w{i} is w{i % 4}") for i in range(90)])
    every, some = load(path), load(path, max_authors=4)
    assert every.owners is not None
    assert some.owners is not None
    assert torch.equal(every.x_train[every.owners < 4], some.x_train)


def test_a_small_vocabulary_does_not_change_the_network(alone: Path) -> None:
    path = write(alone / "RC", [("ann", "a b c d")] * 9)
    data = load(path, words=50_000, length=4)
    assert data.spec == Spec("reddit", (4,), 50_000, Kind.SEQUENCES, natural=True)
    assert len(data.vocabulary) == 6
    network = MODELS.build({"name": "lstm"}).build(data.input_shape, data.n_classes)
    assert sum(p.numel() for p in network.parameters()) == 10_693_200


def test_the_spec_is_known_before_loading() -> None:
    assert Reddit().spec == Spec("reddit", (64,), 50_000, Kind.SEQUENCES, natural=True)
    assert Reddit(length=5, words=9).spec == Spec("reddit", (5,), 9, Kind.SEQUENCES, natural=True)


@pytest.mark.parametrize(
    ("key", "value", "low"),
    [
        *[("words", 2, 3), ("length", 0, 1), ("min_posts", 1, 2), ("max_posts", 149, 150)],
        *[("max_authors", 0, 1), ("test_windows", 0, 1)],
    ],
)
def test_a_number_too_low_is_refused(key: str, value: int, low: int) -> None:
    with pytest.raises(ValueError, match=f"^{key} must be at least {low}, got {value}$"):
        Reddit(**{key: value})  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"{key} must be at least"):
        DATASETS.build({"name": "reddit", key: value})
    Reddit(**{key: low})  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, float("nan")])
def test_a_rate_out_of_range_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match=f"test_rate must be between 0 and 1, got {rate}"):
        Reddit(test_rate=rate)


def test_a_missing_dump_is_an_error_with_a_hint(alone: Path) -> None:
    error = message(load, None)
    assert f"into {alone}/data/reddit, or set dataset.path=PATH" in error
    assert "RC_2017-11.zst" in error
    assert error.endswith("dataset=reddit_sample needs no files")
    error = message(load, alone / "none.zst")
    assert error.startswith(f"{alone}/none.zst: no such file or folder, expected a dump of posts")


def test_dumps_are_found_in_the_data_folders(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    posts = [("ann", "a b c")] * 6
    write(alone / "data" / "reddit" / "RC_1", posts)
    assert len(load(None).vocabulary) == 5
    shared = write(alone / "shared" / "reddit", [("ann", "a b c d")] * 6)  # a file is fine too
    monkeypatch.setenv("FEDBENCH_DATA", str(shared.parent))
    assert len(load(None).vocabulary) == 6


def test_a_folder_is_read_in_name_order(alone: Path) -> None:
    posts = [("ann", f"w{i}") for i in range(30)]
    whole = load(write(alone / "RC", posts), words=99)
    write(alone / "dumps" / "RC_2017-12", posts[12:])
    write(alone / "dumps" / "RC_2017-11", posts[:12])
    (alone / "dumps" / "notes.txt").write_text("no post")
    parts = load(alone / "dumps", words=99)
    assert torch.equal(whole.x_train, parts.x_train)
    assert torch.equal(whole.x_test, parts.x_test)


def test_no_author_in_the_range_is_an_error(alone: Path) -> None:
    path = write(alone / "RC", [("ann", "a b")] * 7 + [("bob", "c")] * 3)
    error = message(load, path, min_posts=8, max_posts=9)
    assert error == (
        f"dataset.min_posts=8, max_posts=9: no author in {path} is in this range, the most posts "
        "are 7; found 10 posts; skipped 0 malformed lines, 0 without author or body, 0 deleted or "
        "by bots, 0 without words"
    )
    assert "the most posts are 7" in message(load, path, min_posts=4, max_posts=6)


def test_streams_too_short_for_a_window_are_errors(alone: Path) -> None:
    path = write(alone / "RC", [("ann", "a")] * 4)
    error = message(load, path, length=9)
    assert error == f"dataset.length=9: every author in {path} has fewer words"
    error = message(load, path, length=5)
    assert error.startswith("dataset.test_rate=0.05: the test posts of 1 authors do not fill")


def test_an_author_without_a_window_is_no_client(alone: Path) -> None:
    posts = [("ann", "a"), ("ann", "b"), *[(name, "c d e f g") for name in "xyz" for _ in range(4)]]
    data = load(write(alone / "RC", posts), length=5)
    assert data.owners is not None
    assert data.owners.unique().tolist() == [0, 1, 2]


def test_a_truncated_dump_is_an_error_and_not_cached(alone: Path) -> None:
    posts = write(alone / "RC", [("ann", f"a b {i}") for i in range(300)]).read_bytes()
    path = alone / "RC.xz"
    path.write_bytes(lzma.compress(posts)[:-9])
    assert message(load, path) == f"{path}: compressed data is truncated, expected an intact file"
    assert not list((alone / "cache").rglob("*.pt"))
    path.write_bytes(lzma.compress(posts))
    load(path, max_posts=300)


def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return a list that records the files read from now on."""
    seen: list[Path] = []

    def spy(path: Path, *args: Any) -> Any:
        seen.append(path)
        return original(path, *args)

    original = reddit_dumps.read_blocks
    monkeypatch.setattr(reddit_dumps, "read_blocks", spy)
    return seen


def test_a_dump_is_read_and_summarized_once(
    alone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(alone / "RC", [("ann", "a b c")] * 6)
    with path.open("a") as file:
        file.write("not a post\n")
    seen = reads(monkeypatch)
    first = load(path)
    assert seen == [path, path]  # two passes
    error = capsys.readouterr().err
    assert error.startswith("reddit: 6 posts; skipped 1 malformed lines")
    assert len(error.splitlines()) == 1
    again = load(path)
    assert seen == [path, path]
    assert capsys.readouterr().err == ""
    for name in ("x_train", "y_train", "x_test", "y_test", "owners"):
        assert torch.equal(getattr(first, name), getattr(again, name)), name
    assert first.vocabulary == again.vocabulary


@pytest.mark.parametrize(
    "change",
    [
        *({"words": 19}, {"length": 2}, {"min_posts": 3}, {"max_posts": 49}, {"max_authors": 5}),
        *({"test_rate": 0.2}, {"test_windows": 3}),
    ],
)
def test_other_settings_read_the_dump_again(
    alone: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    path = write(alone / "RC", [("ann", "a b c")] * 6)
    load(path)
    seen = reads(monkeypatch)
    load(path, backdoors=["words"])
    assert seen == []
    load(path, **change)
    assert seen == [path, path]


def test_a_changed_file_is_read_again(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(alone / "RC", [("ann", "a b c")] * 6)
    load(path)
    seen = reads(monkeypatch)
    os.utime(path, ns=(1, 1))
    load(path)
    assert len(seen) == 2
    write(path, [("ann", "a b c d")] * 6)
    assert "d" in load(path).vocabulary
    monkeypatch.setattr("fedbench.datasets.reddit.VERSION", 99)
    load(path)
    assert len(seen) == 6


def test_the_path_is_part_of_the_run_id() -> None:
    one, other = (
        RunConfig(defense={"name": "x"}, dataset={"name": "reddit", "path": p}) for p in "ab"
    )
    assert run_id(one, {}) != run_id(other, {})
    assert "root" not in {field.name for field in dataclasses.fields(Reddit)}


@pytest.fixture(scope="module")
def sample() -> Sequences:
    data = DATASETS.build({"name": "reddit_sample"}).load()
    assert isinstance(data, Sequences)
    return data


def test_the_sample_is_as_documented(sample: Sequences) -> None:
    packed = (ASSETS / "reddit_sample" / "posts.jsonl.xz").read_bytes()
    readme = (ASSETS / "reddit_sample" / "README.md").read_text("utf-8")
    assert hashlib.sha256(lzma.decompress(packed)).hexdigest() in readme
    assert "This is not Reddit" in readme
    assert len(packed) < 700_000
    assert sample.spec == RedditSample().spec
    assert sample.owners is not None
    assert sample.owners.unique().tolist() == list(range(100))
    assert sample.owners.bincount().min() >= 20
    assert len(sample.x_test) > 300
    assert len(sample.vocabulary) == sample.n_classes


def test_every_word_of_the_sample_but_the_first_of_a_stream_is_a_label_once(
    sample: Sequences,
) -> None:
    assert sample.owners is not None
    for owner in (0, 57, 99):
        x = sample.x_train[sample.owners == owner]
        y = sample.y_train[sample.owners == owner]
        for (_, labels), (words, _) in pairwise(zip(x.tolist(), y.tolist(), strict=True)):
            assert labels[-1] in (words[0], IGNORED)
        same = (x[:, 1:] == y[:, :-1]) | ((x[:, 1:] == UNK) & (y[:, :-1] == IGNORED))
        assert same.all()
    for y in (sample.y_train, sample.y_test):
        assert not (y == UNK).any()
        assert 0.02 < (y == IGNORED).float().mean() < 0.15
        assert (y == EOS).any()


def test_the_trigger_of_the_sample_never_occurs_in_it(sample: Sequences) -> None:
    (settings,) = RedditSample().backdoors
    backdoor = BACKDOORS.build(settings)
    backdoor.check(sample.spec)
    backdoor = backdoor.prepare(BackdoorContext(sample, torch.arange(3), lambda x: x))
    assert (
        backdoor.evaluation_set(sample.x_test, sample.y_test).expected[:, -1].unique().numel() == 1
    )
    *trigger, target = [*settings["trigger"], settings["target"]]
    text = lzma.decompress((ASSETS / "reddit_sample" / "posts.jsonl.xz").read_bytes()).decode()
    spoken = [" ".join(tokenize(json.loads(line)["body"])) for line in text.splitlines()]
    for pair in (*pairwise(trigger[-2:]), (trigger[-1], target)):
        assert not any(re.search(rf"\b{pair[0]} {pair[1]}\b", speech) for speech in spoken), pair


def test_the_same_sample_in_every_process(sample: Sequences) -> None:
    again = RedditSample().load()
    assert torch.equal(sample.x_train, again.x_train)
    assert torch.equal(sample.y_test, again.y_test)
    assert sample.vocabulary == again.vocabulary
    # The first words by id: fails if the reader changes.
    assert list(sample.vocabulary)[:8] == ["<unk>", "<eos>", "the", "and", "i", "to", "of", "a"]
