"""Reading a dump of posts: speed and memory, next to only decompressing it and parsing its JSON.

    python benchmarks/posts.py [--megabytes 1000] [--authors 200000] [--words 2000000]

A dump is made in a temporary folder, plain and .zst: lines with the fields of comments on Reddit,
words and authors by Zipf's law. Each file is read in a fresh process, two passes, without a cache;
another process only decompresses it and parses every line once. Printed: seconds of processor
time, MB of JSON a second, the most memory the reader had, and reader / parsing alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from fedbench.posts import _blocks, _lines
from fedbench.text import Reddit

BATCH = 10_000  # posts made at a time
WORDS_A_POST = 30
AUTHOR_EXPONENT, WORD_EXPONENT = 0.6, 1.05


def zipf(n: int, exponent: float) -> np.ndarray[Any, Any]:
    """[n] chance of a rank up to each, the k-th as likely as k ** -exponent."""
    cumulated = (np.arange(1, n + 1) ** -exponent).cumsum()
    return cumulated / cumulated[-1]


def lines(n_bytes: int, n_authors: int, n_words: int) -> Iterator[bytes]:
    """JSON lines, about `n_bytes` of them."""
    rng = np.random.default_rng(0)
    authors, words = zipf(n_authors, AUTHOR_EXPONENT), zipf(n_words, WORD_EXPONENT)
    spelled = [np.base_repr(word, 36).lower() for word in range(n_words)]
    made = 0
    while made < n_bytes:
        lengths = rng.geometric(1 / WORDS_A_POST, BATCH)
        said = np.searchsorted(words, rng.random(int(lengths.sum()))).tolist()
        ends = lengths.cumsum().tolist()
        who = np.searchsorted(authors, rng.random(BATCH)).tolist()
        for author, begin, end in zip(who, [0, *ends], ends, strict=False):
            body = " ".join([spelled[word] for word in said[begin:end]])
            line = json.dumps(comment(f"author_{author}", body)).encode() + b"\n"
            made += len(line)
            yield line


def comment(author: str, body: str) -> dict[str, Any]:
    return {
        "author": author,
        "author_flair_css_class": None,
        "author_flair_text": None,
        "body": body,
        "can_gild": True,
        "controversiality": 0,
        "created_utc": 1509494400,
        "distinguished": None,
        "edited": False,
        "gilded": 0,
        "id": "dp6xf9y",
        "is_submitter": False,
        "link_id": "t3_79yzrf",
        "parent_id": "t1_dp6x8ku",
        "permalink": "/r/pics/comments/79yzrf/an_example_of_a_title_of_a_post/dp6xf9y/",
        "retrieved_on": 1512064192,
        "score": 4,
        "stickied": False,
        "subreddit": "pics",
        "subreddit_id": "t5_2qh0u",
        "subreddit_type": "public",
    }


def parse(path: Path) -> None:
    """Every line once: what any reader has to do."""
    for block in _lines(_blocks(path, lambda n: None)):
        for line in block:
            if line:
                json.loads(line)


def read(path: Path) -> None:
    """Two passes."""
    windows, counts = Reddit(path=str(path)).read([path])
    authors = int(windows.owners[-1]) + 1
    print(f"  {counts.posts:,} posts, {authors:,} clients, {len(windows.train):,} samples")


def measure(work: Callable[[Path], None], path: Path) -> tuple[float, float]:
    """Seconds of processor time of work in a fresh process, and the most MB of memory it had."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_measured, args=(work, path, queue))
    process.start()
    seconds, megabytes = queue.get()
    process.join()
    return seconds, megabytes


def _measured(work: Callable[[Path], None], path: Path, queue: Any) -> None:
    begun = time.process_time()  # others on the machine do not count
    work(path)
    seconds = time.process_time() - begun
    queue.put((seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


def compare(path: Path, megabytes: float) -> None:
    alone, _ = measure(parse, path)
    seconds, memory = measure(read, path)
    print(
        f"{path.name:12}  {path.stat().st_size / 1e6:7.0f} MB  reader {seconds:7.1f} s  "
        f"{megabytes / seconds:6.1f} MB/s  {memory:6.0f} MB of memory  "
        f"parsing alone {alone:6.1f} s  ratio {seconds / alone:.2f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=1000)
    parser.add_argument("--authors", type=int, default=200_000)
    parser.add_argument("--words", type=int, default=2_000_000)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plain, packed = Path(folder, "RC_made"), Path(folder, "RC_made.zst")
        with plain.open("wb") as file:
            file.writelines(lines(int(chosen.megabytes * 1e6), chosen.authors, chosen.words))
        with plain.open("rb") as file, packed.open("wb") as to:
            zstandard.ZstdCompressor(level=3).copy_stream(file, to)
        for path in (plain, packed):
            compare(path, plain.stat().st_size / 1e6)
