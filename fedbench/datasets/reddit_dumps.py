"""Dumps of posts as pushshift publishes them: JSON lines with `author` and `body`.

Files are plain or compressed (.zst, .xz, .bz2, .gz, told by content) and are read as a stream. What
cannot be used is skipped and counted; memory does not grow with the size of a dump.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import re
import textwrap
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO

import zstandard

from fedbench.errors import UserError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".zst", ".xz", ".bz2", ".gz")
ZSTD = (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + i, 0x2A, 0x4D, 0x18]) for i in range(16)))
OPENERS: dict[bytes, Callable[[IO[bytes]], gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
}
WINDOW = 2**31  # bytes: the published dumps are compressed with a longer memory than is usual
BLOCK = 2**20  # bytes read at once
LONGEST_LINE = 2**23  # bytes; a post of Reddit's has at most 40,000 characters
LONGEST_WORD = 40  # characters; nothing longer gets a number
MAX_WORDS, MAX_AUTHORS = 2**20, 2**21  # counted at once: about 150 and 250 MB
BOTS = ("AutoModerator",)
GONE = ("[deleted]", "[removed]")

# A word is a run of letters and digits, with apostrophes inside. Addresses of the web and entities
# of HTML match without a word: they are dropped, as is every other symbol.
WORD = re.compile(
    r"(?:https?://|www\.)[^\s)\]]+"
    r"|&(?:amp;)?(?:#x?[0-9a-f]{1,6}|[a-z]{2,8});"
    r"|([^\W_]+(?:'[^\W_]+)*)"
)
# What makes a text one that only WORD takes apart rightly; all else of ASCII is words and spaces.
TRICKY = (b"&", b"://", b"www.", b"''")
SPACED = bytes(c if chr(c) in "'0123456789abcdefghijklmnopqrstuvwxyz" else 0x20 for c in range(256))
AUTHOR = re.compile(rb'"author"\s*:\s*"([^"\\]*)"')


def words_of(body: str) -> list[str]:
    """The words of a post, in lower case: `Don't _say_ "no"!` is don't, say, no."""
    text = body.lower().replace("\u2019", "'")
    if text.isascii():  # five times as fast, and most posts are
        plain = b" %b " % text.encode()
        if not any(map(plain.__contains__, TRICKY)):
            spaced = plain.translate(SPACED)
            return spaced.replace(b" '", b"  ").replace(b"' ", b"  ").decode().split()
    return [word for word in WORD.findall(text) if word]


@dataclass
class Counts:
    """What the lines of a dump were."""

    posts: int = 0  # that can be used
    malformed: int = 0  # no JSON object in UTF-8
    incomplete: int = 0  # no text as author or body
    removed: int = 0  # deleted, removed, or of a bot
    empty: int = 0  # without a word

    def __str__(self) -> str:
        return (
            f"{self.posts:,} posts; skipped {self.malformed:,} malformed lines, "
            f"{self.incomplete:,} without author or body, {self.removed:,} deleted or of bots, "
            f"{self.empty:,} without a word"
        )


class Tally:
    """Counts of strings in bounded memory: lossy counting, after Manku and Motwani (VLDB 2002).

    Whenever more than `limit` strings are held, the rarest go, until no more than half of `limit`
    are left. So a count is too low by at most `error`, the sum over these times of the largest
    count that went, and no string that occurs more often than `error` is missing. Up to `limit`
    different strings are counted exactly.
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
        """Forgets strings so long that many of them would fill the memory."""
        for key in [key for key in self.counts if len(key) > LONGEST_WORD]:
            del self.counts[key]


@dataclass(frozen=True)
class Census:
    """What the first pass over a dump finds."""

    counts: Counts = field(default_factory=Counts)
    words: Tally = field(default_factory=lambda: Tally(MAX_WORDS))
    authors: Tally = field(default_factory=lambda: Tally(MAX_AUTHORS))

    def most_frequent(self, n: int) -> list[str]:
        """The n words that occur most often; of equally frequent ones the first by alphabet."""
        return sorted(self.words.counts, key=lambda word: (-self.words.counts[word], word))[:n]

    def authors_between(self, low: int, high: int, limit: int | None) -> list[str]:
        """Authors with `low` to `high` posts, in the order of a hash of their names.

        Where counts are inexact, it is all who may have as many, until `limit` of them do for sure.
        """
        counts, error = self.authors.counts, self.authors.error
        possible = [author for author, n in counts.items() if n + error >= low and n <= high]
        chosen: list[str] = []
        n_sure = 0
        for author in sorted(possible, key=_place):
            if n_sure == limit:
                break
            chosen.append(author)
            n_sure += low <= counts[author] and counts[author] + error <= high
        return chosen


def take_census(files: Sequence[Path], told: Callable[[int], object]) -> Census:
    """Counts words and authors over all posts; a UserError for a file without a usable post."""
    census = Census()
    words, authors = census.words, census.authors
    for path in files:
        counts = Counts()
        for i, posts in enumerate(read_posts(path, counts, told)):
            authors.counts.update([author for author, _ in posts])
            authors.prune()
            words.counts.update(chain.from_iterable(said for _, said in posts))
            words.prune()
            if i % 64 == 0:  # seldom enough to cost nothing, often enough for memory
                words.drop_long()
        words.drop_long()
        if not counts.posts:
            raise UserError(f"{path}: expected JSON lines with author and body, found {counts}")
        for name, n in vars(counts).items():
            setattr(census.counts, name, getattr(census.counts, name) + n)
    return census


def _place(author: str) -> tuple[bytes, str]:
    """Orders authors by nothing that has to do with what or when they write."""
    name = author.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(name, digest_size=8).digest(), author


def read_posts(
    path: Path,
    counts: Counts,
    told: Callable[[int], object],
    wanted: Collection[bytes] | None = None,
) -> Iterator[list[tuple[str, list[str]]]]:
    """The posts of a file as (author, words), a block at a time; `counts` goes along.

    With `wanted`, names in UTF-8, lines of other authors are passed over unread where their bytes
    tell whose they are. `told` gets the number of bytes read of the file since it was last called.
    """
    for lines in _lines(_blocks(path, told)):
        if wanted is not None:
            lines = [line for line in lines if _may_be_of(line, wanted)]
        found = (_post(line, counts) for line in lines)
        yield [post for post in found if post is not None]


def _may_be_of(line: bytes, wanted: Collection[bytes]) -> bool:
    names = AUTHOR.findall(line)
    return not names or any(name in wanted for name in names)


def _post(line: bytes, counts: Counts) -> tuple[str, list[str]] | None:
    """The author and the words of a line; None, and counted, if it cannot be used."""
    if not line or line.isspace():
        return None
    try:
        post = json.loads(line.decode()) if len(line) < LONGEST_LINE else None
    except (ValueError, RecursionError):  # no UTF-8, no JSON; brackets without end
        post = None
    if not isinstance(post, dict):
        counts.malformed += 1
        return None
    author, body = post.get("author"), post.get("body")
    if not isinstance(author, str) or not isinstance(body, str):
        counts.incomplete += 1
        return None
    if author in BOTS or author in GONE or body.strip() in GONE:
        counts.removed += 1
        return None
    if not (words := words_of(body)):
        counts.empty += 1
        return None
    counts.posts += 1
    return author, words


def _lines(blocks: Iterator[bytes]) -> Iterator[list[bytes]]:
    """The lines of a stream, as many at a time as a block ends; too long ones are cut."""
    rest = b""
    for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        rest = rest[:LONGEST_LINE]
        yield lines
    yield [rest]


def _blocks(path: Path, told: Callable[[int], object]) -> Iterator[bytes]:
    """The bytes of a file, decompressed; a UserError if it is damaged or cut off."""
    place = 0
    try:
        with path.open("rb") as file:
            for block in _unpacked(file):
                read, place = file.tell() - place, file.tell()
                told(read)
                yield block
    except EOFError as error:
        raise UserError(f"{path}: compressed data is cut off, expected a whole file") from error
    except (OSError, lzma.LZMAError, zlib.error, zstandard.ZstdError) as error:
        reason = textwrap.shorten(str(error), 100)
        raise UserError(f"{path}: cannot be read ({reason}), expected a whole file") from error


def _unpacked(file: IO[bytes]) -> Iterator[bytes]:
    head = file.read(6)
    file.seek(0)
    if head.startswith(ZSTD):
        yield from _unpacked_zstd(file)
        return
    opener = next((o for magic, o in OPENERS.items() if head.startswith(magic)), None)
    stream = file if opener is None else opener(file)
    yield from iter(partial(stream.read, BLOCK), b"")


def _unpacked_zstd(file: IO[bytes]) -> Iterator[bytes]:
    """Frame by frame, since the stream reader of zstandard takes a cut file for a whole one."""
    decoder = zstandard.ZstdDecompressor(max_window_size=WINDOW)
    frame = None
    while data := file.read(BLOCK // 8):
        while data:
            frame = frame or decoder.decompressobj()
            yield frame.decompress(data)
            data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError


def find_dumps(path: Path) -> list[Path]:
    """A dump by its path, or those in a folder, by name."""
    if path.is_file():
        return [path]
    names = sorted(child.name for child in path.iterdir() if child.is_file())
    files = [path / name for name in names if not name.startswith(".") and _is_dump(name)]
    if not files:
        raise UserError(
            f"{path}: expected dumps of posts (RC_* or *.jsonl, plain or .zst, .xz, .bz2, .gz), "
            f"found {', '.join(names[:5]) or 'nothing'}"
        )
    return files


def _is_dump(name: str) -> bool:
    return name.startswith("RC_") or any(suffix in name for suffix in SUFFIXES)
