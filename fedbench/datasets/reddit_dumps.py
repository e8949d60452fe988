"""Reader for pushshift dumps: JSON lines with `author` and `body`.

Files are plain or compressed (.zst, .xz, .bz2, .gz, detected by content) and are streamed. Unusable
lines are skipped and counted. Memory does not grow with the size of a dump.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO

import zstandard

from fedbench.datasets.bounded_files import Expansion
from fedbench.datasets.files import reading
from fedbench.errors import UserError

DUMP_NAME = re.compile(r"RC_|[^.].*\.(jsonl|ndjson|json|zst|xz|bz2|gz)")
ZSTD_MAGIC = (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + i, 0x2A, 0x4D, 0x18]) for i in range(16)))
OPENERS: dict[bytes, Callable[[IO[bytes]], gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
}
ZSTD_MAX_WINDOW = 2**31  # bytes; the published dumps exceed zstd's default window limit
ZSTD_READ = 2**12  # bytes to decompress at a time: never to more than 128 MB
BLOCK = 2**20  # bytes per read
LONGEST_LINE = 2**23  # bytes; Reddit limits a post to 40,000 characters
LONGEST_WORD = 40  # characters; longer words are not counted
MAX_WORDS, MAX_AUTHORS = 2**20, 2**21  # held in memory: about 150 and 250 MB
BOTS = ("AutoModerator",)
REMOVED = ("[deleted]", "[removed]")

# A word is a run of letters and digits with inner apostrophes. URLs and HTML entities match without
# a group, so they are dropped like all other symbols.
WORD = re.compile(
    r"(?:https?://|www\.)[^\s)\]]+"
    r"|&(?:amp;)?(?:#x?[0-9a-f]{1,6}|[a-z]{2,8});"
    r"|([^\W_]+(?:'[^\W_]+)*)"
)
# ASCII text without these needs no regex: every byte outside WORD_BYTES separates words.
NEEDS_REGEX = (b"&", b"://", b"www.", b"''")
WORD_BYTES = b"'0123456789abcdefghijklmnopqrstuvwxyz"
TO_SPACES = bytes(c if c in WORD_BYTES else 0x20 for c in range(256))
AUTHOR = re.compile(rb'"author"\s*:\s*"([^"\\]*)"')


def tokenize(body: str) -> list[str]:
    """Split a post into lower-case words: `Don't _say_ "no"!` gives don't, say, no."""
    text = body.lower().replace("\u2019", "'")
    if text.isascii():  # true for most posts, and five times as fast
        plain = b" %b " % text.encode()
        if not any(map(plain.__contains__, NEEDS_REGEX)):
            spaced = plain.translate(TO_SPACES)
            return spaced.replace(b" '", b"  ").replace(b"' ", b"  ").decode().split()
    return [word for word in WORD.findall(text) if word]


@dataclass
class LineCounts:
    """Number of lines of a dump, by kind."""

    posts: int = 0  # usable
    malformed: int = 0  # not a JSON object in UTF-8
    incomplete: int = 0  # author or body missing or not a string
    removed: int = 0  # deleted, removed, or by a bot
    empty: int = 0  # no words

    def __str__(self) -> str:
        return (
            f"{self.posts:,} posts; skipped {self.malformed:,} malformed lines, "
            f"{self.incomplete:,} without author or body, {self.removed:,} deleted or by bots, "
            f"{self.empty:,} without words"
        )


class LossyCounter:
    """Counts strings in bounded memory by lossy counting (Manku and Motwani, VLDB 2002).

    When it holds more than `limit` strings, it drops the rarest until at most `limit` / 2 are left.
    `error` sums the largest count dropped each time. Counts are too low by at most `error`, and
    every string that occurs more than `error` times is present. Up to `limit` different strings are
    counted exactly.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.counts: Counter[str] = Counter()
        self.error = 0

    def prune(self) -> None:
        if len(self.counts) <= self.limit:
            return
        left, largest = len(self.counts), 0
        for count, n_strings in sorted(Counter(self.counts.values()).items()):
            left, largest = left - n_strings, count
            if left <= self.limit // 2:
                break
        self.counts = Counter({key: n for key, n in self.counts.items() if n > largest})
        self.error += largest

    def drop_long(self) -> None:
        """Drop strings so long that many of them would fill the memory."""
        for key in [key for key in self.counts if len(key) > LONGEST_WORD]:
            del self.counts[key]


@dataclass(frozen=True)
class DumpStatistics:
    """Result of the first pass over the dumps."""

    lines: LineCounts = field(default_factory=LineCounts)
    words: LossyCounter = field(default_factory=lambda: LossyCounter(MAX_WORDS))
    authors: LossyCounter = field(default_factory=lambda: LossyCounter(MAX_AUTHORS))

    def most_frequent(self, n: int) -> list[str]:
        """Return the n most frequent words; ties go to the alphabetically first."""
        return sorted(self.words.counts, key=lambda word: (-self.words.counts[word], word))[:n]

    def authors_between(self, low: int, high: int, limit: int | None) -> list[str]:
        """Return authors with `low` to `high` posts, ordered by a hash of their names.

        If counts are inexact, include authors who may qualify, until `limit` certainly do.
        """
        counts, error = self.authors.counts, self.authors.error
        possible = [author for author, n in counts.items() if n + error >= low and n <= high]
        chosen: list[str] = []
        n_certain = 0
        for author in sorted(possible, key=_hash_key):
            if n_certain == limit:
                break
            chosen.append(author)
            n_certain += low <= counts[author] and counts[author] + error <= high
        return chosen


def scan_dumps(files: Sequence[Path], on_progress: Callable[[int], object]) -> DumpStatistics:
    """Count words and authors of all posts. A file without a usable post is a UserError."""
    statistics = DumpStatistics()
    words, authors = statistics.words, statistics.authors
    for path in files:
        counts = LineCounts()
        for i, posts in enumerate(read_posts(path, counts, on_progress)):
            authors.counts.update([author for author, _ in posts])
            authors.prune()
            words.counts.update(chain.from_iterable(tokens for _, tokens in posts))
            words.prune()
            if i % 64 == 0:  # rare enough to be cheap, frequent enough to bound memory
                words.drop_long()
        words.drop_long()
        if not counts.posts:
            raise UserError(f"{path}: expected JSON lines with author and body, found {counts}")
        for name, n in vars(counts).items():
            setattr(statistics.lines, name, getattr(statistics.lines, name) + n)
    return statistics


def _hash_key(author: str) -> tuple[bytes, str]:
    """Sort key that is unrelated to what or when an author writes."""
    name = author.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(name, digest_size=8).digest(), author


def read_posts(
    path: Path,
    counts: LineCounts,
    on_progress: Callable[[int], object],
    wanted: Collection[bytes] | None = None,
) -> Iterator[list[tuple[str, list[str]]]]:
    """Yield the posts of a file as lists of (author, words), updating `counts`.

    With `wanted`, author names in UTF-8, skip lines of other authors without parsing them, if the
    raw bytes show the author. `on_progress` receives the number of bytes read since its last call.
    """
    for lines in split_lines(read_blocks(path, on_progress)):
        if wanted is not None:
            lines = [line for line in lines if _may_match(line, wanted)]
        found = (_parse_post(line, counts) for line in lines)
        yield [post for post in found if post is not None]


def _may_match(line: bytes, wanted: Collection[bytes]) -> bool:
    names = AUTHOR.findall(line)
    return not names or any(name in wanted for name in names)


def _parse_post(line: bytes, counts: LineCounts) -> tuple[str, list[str]] | None:
    """Return a line's author and words, or None if unusable; count all but blank lines."""
    if not line or line.isspace():
        return None
    try:
        post = json.loads(line.decode()) if len(line) < LONGEST_LINE else None
    except (ValueError, RecursionError):  # not UTF-8 or JSON; deeply nested brackets
        post = None
    if not isinstance(post, dict):
        counts.malformed += 1
        return None
    author, body = post.get("author"), post.get("body")
    if not isinstance(author, str) or not isinstance(body, str):
        counts.incomplete += 1
        return None
    if author in BOTS or author in REMOVED or body.strip() in REMOVED:
        counts.removed += 1
        return None
    if not (words := tokenize(body)):
        counts.empty += 1
        return None
    counts.posts += 1
    return author, words


def split_lines(blocks: Iterator[bytes]) -> Iterator[list[bytes]]:
    """Yield the complete lines of each block; truncate lines at LONGEST_LINE."""
    rest = b""
    for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        rest = rest[:LONGEST_LINE]
        yield lines
    yield [rest]


def read_blocks(path: Path, on_progress: Callable[[int], object]) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file."""
    position = 0
    with reading(path, "an intact file", zstandard.ZstdError), path.open("rb") as file:
        expansion = Expansion(path) if _is_compressed(file) else None
        for block in _decompress(file):
            if expansion is not None:
                expansion.add(len(block))
            n_read, position = file.tell() - position, file.tell()
            on_progress(n_read)
            yield block


def _is_compressed(file: IO[bytes]) -> bool:
    head = file.read(6)
    file.seek(0)
    return head.startswith((*ZSTD_MAGIC, *OPENERS))


def _decompress(file: IO[bytes]) -> Iterator[bytes]:
    head = file.read(6)
    file.seek(0)
    if head.startswith(ZSTD_MAGIC):
        yield from _decompress_zstd(file)
        return
    opener = next((o for magic, o in OPENERS.items() if head.startswith(magic)), None)
    stream = file if opener is None else opener(file)
    yield from iter(partial(stream.read, BLOCK), b"")


def _decompress_zstd(file: IO[bytes]) -> Iterator[bytes]:
    """Decompress frame by frame, because zstandard's stream reader ignores truncation."""
    decoder = zstandard.ZstdDecompressor(max_window_size=ZSTD_MAX_WINDOW)
    frame, block = None, bytearray()
    while data := file.read(ZSTD_READ):
        while data:
            frame = frame or decoder.decompressobj()
            block += frame.decompress(data)
            data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        if len(block) >= BLOCK:
            yield bytes(block)
            block.clear()
    yield bytes(block)
    if frame is not None:
        raise EOFError


def find_dumps(path: Path) -> list[Path]:
    """Return the dump at `path`, or all dumps in that folder, sorted by name."""
    if path.is_file():
        return [path]
    names = sorted(child.name for child in path.iterdir() if child.is_file())
    files = [path / name for name in names if DUMP_NAME.match(name)]
    if not files:
        raise UserError(
            f"{path}: expected dumps of posts (RC_* or *.jsonl, plain or .zst, .xz, .bz2, .gz), "
            f"found {', '.join(names[:5]) or 'nothing'}"
        )
    return files
