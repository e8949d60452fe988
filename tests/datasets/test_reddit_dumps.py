"""fedbench.datasets.reddit_dumps: lines, compression formats, counts, bounded memory."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbench.datasets import reddit_dumps
from fedbench.datasets.reddit_dumps import (
    DumpStatistics,
    LineCounts,
    LossyCounter,
    find_dumps,
    read_posts,
    scan_dumps,
    tokenize,
)
from fedbench.errors import UserError

PACK: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


def line(author: Any, body: Any, **more: Any) -> bytes:
    return json.dumps({**more, "author": author, "body": body}).encode() + b"\n"


def silent(n: int) -> None:
    pass


def read(path: Path, counts: LineCounts | None = None, **more: Any) -> list[tuple[str, list[str]]]:
    blocks = read_posts(path, counts or LineCounts(), silent, **more)
    return [post for block in blocks for post in block]


def message(call: Callable[..., Any], *args: Any) -> str:
    """Return the message of the UserError: one line."""
    with pytest.raises(UserError) as caught:
        call(*args)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    return text


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("Pasta from Astoria tastes DELICIOUS!!", "pasta from astoria tastes delicious"),
        ("don't 'quote' rock'n'roll the dogs' o'", "don't quote rock'n'roll the dogs o"),
        ("it\u2019s 3.5 km, 2nd", "it's 3 5 km 2nd"),
        ("*so* _very_ **good** snake_case", "so very good snake case"),
        ("see [this](https://a.b/c?d=e_f#g)now and http://x.y z", "see this now and z"),
        ("WWW.Example.com/a is wwwhat", "is wwwhat"),
        ("&gt; R&amp;B &amp;#x200B; AT&T; fish&chips", "r b at t fish chips"),
        ("&gt;quoted &lt;b&gt; a&nbsp;b", "quoted b a b"),
        (
            "\u00c9t\u00e9 \u00fcber \u041c\u043e\u0441\u043a\u0432\u0430 \u65e5\u672c",
            "\u00e9t\u00e9 \u00fcber \u043c\u043e\u0441\u043a\u0432\u0430 \u65e5\u672c",
        ),
        (":) --- https://a.b", ""),
        ("a\nb\tc\u00a0d", "a b c d"),
        ("a' 'b '' c''d 'e' ' f", "a b c d e f"),
        ("\u2018a\u2019s b\u2019", "a's b"),
    ],
)
def test_words_by_hand(body: str, words: str) -> None:
    assert tokenize(body) == words.split()


@settings(derandomize=True, max_examples=300)
@given(st.text())
def test_words_are_letters_and_digits_in_lower_case_with_apostrophes_inside(body: str) -> None:
    for word in tokenize(body):
        assert word == word.lower()
        assert all(part.isalnum() for part in word.split("'"))


@settings(derandomize=True, max_examples=200)
@given(
    st.lists(st.text("abc123\u00e9", min_size=1)), st.sampled_from([" ", "\n", ", ", " - ", "*"])
)
def test_joined_words_are_split_again(words: list[str], between: str) -> None:
    assert tokenize(between.join(words)) == words


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("name", ["RC_2017-11", "wrong.name.bz2"])
def test_compression_is_detected_by_content(tmp_path: Path, suffix: str, name: str) -> None:
    path = tmp_path / (name + suffix)
    path.write_bytes(PACK[suffix](line("ann", "a b") + line("bob", "c")))
    assert read(path) == [("ann", ["a", "b"]), ("bob", ["c"])]


def test_concatenated_compressed_files_are_read_to_the_end(tmp_path: Path) -> None:
    skippable = b"\x5a\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"
    for suffix, pack in PACK.items():
        data = [pack(line("ann", str(i))) for i in range(5)]
        path = tmp_path / f"a{suffix}"
        path.write_bytes(b"".join(data))
        assert read(path) == [("ann", [str(i)]) for i in range(5)], suffix
    path.write_bytes(skippable + data[0] + skippable + data[1])
    assert read(path) == [("ann", ["0"]), ("ann", ["1"])]


def test_large_zstd_windows_as_in_the_published_dumps(tmp_path: Path) -> None:
    """The window is 2^28 bytes; the default limit is 2^27."""
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=False)
    packed = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path = tmp_path / "RC.zst"
    path.write_bytes(packed.compress(line("ann", "far")) + packed.flush())
    with pytest.raises(zstandard.ZstdError), path.open("rb") as file:
        zstandard.ZstdDecompressor().stream_reader(file).read()
    assert read(path) == [("ann", ["far"])]


@pytest.mark.parametrize("suffix", [suffix for suffix in PACK if suffix])
def test_truncated_and_damaged_files_are_errors(tmp_path: Path, suffix: str) -> None:
    rng = random.Random(0)
    data = b"".join(line("ann", f"{rng.random()} {rng.random()}") for _ in range(500))
    packed = PACK[suffix](data)
    path = tmp_path / f"RC{suffix}"
    for length in (len(packed) // 3, len(packed) - 40, len(packed) - 1):
        path.write_bytes(packed[:length])
        assert (
            message(read, path) == f"{path}: compressed data is truncated, expected an intact file"
        )
    path.write_bytes(packed[:50] + bytes(100) + packed[150:])
    assert message(read, path).startswith(f"{path}: cannot be read (")


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    error = message(read, tmp_path / "none.zst")
    assert error.startswith(f"{tmp_path}/none.zst: cannot be read (")


def test_unusable_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    malformed = [
        *(b"{", b"no json", b'{"author": "a", "body": "cut', b"[" * 100_000, b"\x00"),
        *(b"[1, 2]", b'"text"', b"null", b"17", b"\xef\xbb\xbf{}", b"1" * 10_000),
        b'{"author": "a", "body": "\xff"}',
        line("a", "utf 16").decode().encode("utf-16"),
    ]
    malformed = [part for text in malformed for part in text.split(b"\n") if part.strip()]
    incomplete = [line(a, b) for a, b in ((None, "x"), ("x", None), (1, "x"), ("x", ["y"]))]
    incomplete += [b'{"author": "x"}', b'{"body": "x"}', b"{}"]
    gone = [("[deleted]", "x"), ("x", "[deleted]"), ("x", " [removed]\n"), ("AutoModerator", "x")]
    empty = [line("a", body) for body in ("", " ", "https://a.b", "?!")]
    good = [line("a", "one"), b"  " + line("b", "two [deleted]"), line("c", "three")[:-1]]
    removed = [line(*post) for post in gone]
    lines = [*malformed, *incomplete, *removed, *empty, b"\n", b"  \r\n", *good]
    random.Random(0).shuffle(lines)
    path.write_bytes(b"\n".join(lines))
    counts = LineCounts()
    assert sorted(read(path, counts)) == [
        ("a", ["one"]),
        ("b", ["two", "deleted"]),
        ("c", ["three"]),
    ]
    assert counts == LineCounts(3, len(malformed), len(incomplete), len(removed), len(empty))
    assert str(counts) == (
        f"3 posts; skipped {len(malformed)} malformed lines, 7 without author or body, "
        "4 deleted or by bots, 4 without words"
    )


def test_lines_do_not_depend_on_the_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    bodies = [
        " ".join(f"w{rng.randrange(99)}" for _ in range(rng.randrange(1, 30))) for _ in range(60)
    ]
    data = b"".join(line("ann", body) for body in bodies)
    for suffix, pack in PACK.items():
        path = tmp_path / f"a{suffix}"
        path.write_bytes(pack(data))
        for block in (8, 100, 2**20):
            monkeypatch.setattr(reddit_dumps, "BLOCK", block)
            assert read(path) == [("ann", body.split()) for body in bodies]


def test_an_endless_line_is_truncated_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reddit_dumps, "BLOCK", 64)
    monkeypatch.setattr(reddit_dumps, "LONGEST_LINE", 500)
    path, counts = tmp_path / "a", LineCounts()
    # The second line would still be JSON if its middle were dropped.
    path.write_bytes(line("a", "one") + line("b", "x" * 5000) + line("c", "two") + b"y" * 5000)
    assert read(path, counts) == [("a", ["one"]), ("c", ["two"])]
    assert counts == LineCounts(posts=2, malformed=2)
    held = max(
        len(part) for block in reddit_dumps.split_lines(iter([b"z" * 64] * 100)) for part in block
    )
    assert held == 500


def test_only_lines_of_other_authors_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a"
    kept = [
        line("ann", "plain"),
        line("ann", 'says "author":"bob"'),
        b'{"body": "spaces", "author" :\t"ann"}\n',
        b'{"author": "\\u0061nn", "body": "escaped"}\n',
        b'{"auth\\u006fr": "ann", "body": "key"}\n',
        b'{"parent": {"author": "bob"}, "author": "ann", "body": "nested"}\n',
        b'{"author": "bob", "author": "ann", "body": "twice"}\n',
        '{"author": "\u00e9va", "body": "accent"}\n'.encode(),
        line("\u00e9va", "accent escaped"),
    ]
    path.write_bytes(b"".join(text for own in kept for text in (own, line("bob", "no"))))
    wanted, counts = {b"ann", "\u00e9va".encode()}, LineCounts()
    found = [post for post in read(path, counts, wanted=wanted) if post[0] != "bob"]
    assert found == [post for post in read(path) if post[0] != "bob"]
    assert len(found) == len(kept)
    assert counts.posts == len(kept)  # bob's lines were not parsed


def test_progress_adds_up_to_the_file_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reddit_dumps, "BLOCK", 2**12)
    data = b"".join(line("ann", str(random.Random(i).random())) for i in range(20_000))
    for suffix, pack in PACK.items():
        path = tmp_path / f"a{suffix}"
        path.write_bytes(pack(data))
        steps: list[int] = []
        list(read_posts(path, LineCounts(), steps.append))
        assert min(steps) >= 0
        assert sum(steps) == path.stat().st_size
        assert len(steps) > 2


def test_pruning_by_hand() -> None:
    # Six strings with a limit of four: the rarest are dropped until two are left. Three have count
    # 1 and one has count 2; the other two stay, and 2 is the largest count dropped.
    counter = LossyCounter(4)
    counter.counts = Counter("aabbbccccdef")
    counter.prune()
    assert counter.counts == {"b": 3, "c": 4}
    assert counter.error == 2
    counter.counts.update("aab")
    counter.prune()
    assert counter.counts == {"a": 2, "b": 4, "c": 4}
    assert counter.error == 2


@settings(derandomize=True, max_examples=200)
@given(st.integers(2, 12), st.lists(st.lists(st.sampled_from("abcdefghijklmnop"), max_size=40)))
def test_counts_are_too_low_by_the_error_at_most(limit: int, batches: list[list[str]]) -> None:
    counter, true = LossyCounter(limit), Counter[str]()
    for batch in batches:
        counter.counts.update(batch)
        true.update(batch)
        counter.prune()
        assert len(counter.counts) <= limit
        for string, n in true.items():
            assert n - counter.error <= counter.counts[string] <= n
    if len(true) <= limit:
        assert counter.counts == true


def write(path: Path, authors: str, n_files: int = 1) -> list[Path]:
    """Files with one post per author: the author's name and a number."""
    files = [path / f"RC_{i}" for i in range(n_files)]
    for i, file in enumerate(files):
        file.write_bytes(
            b"".join(line(a, f"{a} {j % 7}") for j, a in enumerate(authors[i::n_files]))
        )
    return files


def test_a_scan_counts_words_and_authors_of_all_files(tmp_path: Path) -> None:
    authors = "abracadabra"
    for n_files in (1, 3):
        statistics = scan_dumps(write(tmp_path, authors, n_files), silent)
        assert statistics.authors.counts == Counter(authors)
        assert statistics.lines.posts == 11
        letters = {w: n for w, n in statistics.words.counts.items() if w.isalpha()}
        assert letters == Counter(authors)
        assert sum(statistics.words.counts.values()) == 22


def test_words_by_frequency_then_alphabet() -> None:
    statistics = DumpStatistics()
    statistics.words.counts = Counter({"b": 2, "z": 5, "a": 2, "c": 2, "y": 1})
    assert statistics.most_frequent(3) == ["z", "a", "b"]
    assert statistics.most_frequent(99) == ["z", "a", "b", "c", "y"]


def test_authors_are_ordered_by_hash() -> None:
    statistics = DumpStatistics()
    statistics.authors.counts = Counter({f"author{i}": i for i in range(1, 60)})
    everyone = statistics.authors_between(10, 50, None)
    assert sorted(everyone) == sorted(f"author{i}" for i in range(10, 51))
    assert everyone != sorted(everyone)
    assert everyone[:7] == statistics.authors_between(10, 50, 7)
    statistics.authors.counts = Counter(dict(reversed(statistics.authors.counts.items())))
    assert statistics.authors_between(10, 50, None) == everyone
    assert statistics.authors_between(60, 70, None) == []


def test_authors_with_inexact_counts_are_included() -> None:
    # If counts are up to 3 too low, 7 to 9 may really be 10 or more, and 18 to 20 above 20.
    statistics = DumpStatistics()
    statistics.authors.counts = Counter({f"author{i}": i for i in range(1, 30)})
    statistics.authors.error = 3
    possible = statistics.authors_between(10, 20, None)
    assert sorted(possible) == sorted(f"author{i}" for i in range(7, 21))
    certain = [name for name in possible if 10 <= int(name[6:]) <= 17]
    some = statistics.authors_between(10, 20, 4)
    assert some == possible[: len(some)]
    assert [name for name in some if name in certain] == certain[:4]
    assert some[-1] == certain[3]


def test_memory_is_bounded_and_frequent_strings_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reddit_dumps, "MAX_WORDS", 64)
    monkeypatch.setattr(reddit_dumps, "MAX_AUTHORS", 32)
    monkeypatch.setattr(reddit_dumps, "BLOCK", 256)
    rare = iter(range(10**6))
    lines = []
    for i in range(3000):
        lines.append(line(f"once{next(rare)}", f"the cat {next(rare)} {'l' * 41}{i}"))
        if i % 10 == 0:
            lines.append(line("often", "the dog"))
    (tmp_path / "RC").write_bytes(b"".join(lines))
    statistics = scan_dumps([tmp_path / "RC"], silent)
    assert len(statistics.words.counts) <= 64
    assert len(statistics.authors.counts) <= 32
    assert statistics.most_frequent(2) == ["the", "cat"]
    assert statistics.words.counts["the"] >= 3300 - statistics.words.error
    assert "often" in statistics.authors_between(300, 300, None)
    assert max(map(len, statistics.words.counts)) <= reddit_dumps.LONGEST_WORD


def test_a_file_without_posts_is_an_error(tmp_path: Path) -> None:
    good, bad = write(tmp_path, "ab")[0], tmp_path / "RS_2017"
    bad.write_bytes(b'{"author": "a", "title": "b"}\nx\n')
    error = message(scan_dumps, [good, bad], silent)
    assert error == (
        f"{bad}: expected JSON lines with author and body, found 0 posts; skipped 1 malformed "
        "lines, 1 without author or body, 0 deleted or by bots, 0 without words"
    )
    bad.write_bytes(b"")
    assert "found 0 posts" in message(scan_dumps, [bad], silent)


def test_dumps_in_a_folder_are_sorted_by_name(tmp_path: Path) -> None:
    names = ["b.jsonl", "RC_2017-11", "a.json.gz", "RC_2017-02.bz2", "c.zst", "d.xz"]
    for name in [*names, "README.md", ".hidden.zst"]:
        (tmp_path / name).touch()
    (tmp_path / "folder.zst").mkdir()
    assert [path.name for path in find_dumps(tmp_path)] == sorted(names)
    assert find_dumps(tmp_path / "README.md") == [tmp_path / "README.md"]


def test_a_folder_without_dumps_is_an_error(tmp_path: Path) -> None:
    assert message(find_dumps, tmp_path).endswith("found nothing")
    (tmp_path / "notes.txt").touch()
    error = message(find_dumps, tmp_path)
    assert error.startswith(f"{tmp_path}: expected dumps of posts (RC_* or *.jsonl, plain or .zst")
    assert error.endswith("found notes.txt")
