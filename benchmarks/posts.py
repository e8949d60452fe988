"""Dump reader: speed and memory, compared to only decompressing a dump and parsing its JSON.

    python -m benchmarks posts [--megabytes 100]

The benchmark writes a synthetic dump to a temporary folder, plain and .zst: lines with the fields
of Reddit comments, words and authors drawn from Zipf's law. The reader processes each file in a
fresh process, in two passes, without a cache; the baseline process only decompresses it and parses
every line once. Seconds are processor time. Each row also shows the file size in MB, MB of JSON per
second, the reader's peak memory in MB, and the numbers of posts, clients and samples.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from benchmarks._measure import Options, Row, process_memory, repeat_interleaved
from fedbench.datasets.reddit import Reddit
from fedbench.datasets.reddit_dumps import read_blocks, split_lines

BATCH = 10_000  # posts generated at a time
WORDS_PER_POST = 30
AUTHORS_PER_MEGABYTE, WORDS_PER_MEGABYTE = 200, 2_000  # distinct
AUTHOR_EXPONENT, WORD_EXPONENT = 0.6, 1.05

Work = Callable[[Path], dict[str, float]]  # returns counts by name


def measure(options: Options) -> Iterator[Row]:
    megabytes = options.megabytes or (5 if options.quick else 100)
    with tempfile.TemporaryDirectory() as folder:
        plain, packed = Path(folder, "RC_made"), Path(folder, "RC_made.zst")
        with plain.open("wb") as file:
            file.writelines(lines(megabytes))
        with plain.open("rb") as file, packed.open("wb") as to:
            zstandard.ZstdCompressor(level=3).copy_stream(file, to)
        for path in (plain, packed):
            yield compare(path, plain.stat().st_size / 1e6, options)


def zipf(n: int, exponent: float) -> NDArray[np.float64]:
    """Return the cumulative distribution [n] of ranks with weights k ** -exponent."""
    cumulative: NDArray[np.float64] = (np.arange(1, n + 1) ** -exponent).cumsum()
    cumulative /= cumulative[-1]
    return cumulative


def lines(megabytes: int) -> Iterator[bytes]:
    """Yield JSON lines."""
    rng = np.random.default_rng(0)
    n_words = WORDS_PER_MEGABYTE * megabytes
    author_ranks = zipf(AUTHORS_PER_MEGABYTE * megabytes, AUTHOR_EXPONENT)
    word_ranks = zipf(n_words, WORD_EXPONENT)
    vocabulary = [np.base_repr(word, 36).lower() for word in range(n_words)]
    n_bytes = 0
    while n_bytes < megabytes * 1e6:
        lengths = rng.geometric(1 / WORDS_PER_POST, BATCH)
        words = np.searchsorted(word_ranks, rng.random(int(lengths.sum()))).tolist()
        ends = lengths.cumsum().tolist()
        authors = np.searchsorted(author_ranks, rng.random(BATCH)).tolist()
        for author, begin, end in zip(authors, [0, *ends], ends, strict=False):
            body = " ".join([vocabulary[word] for word in words[begin:end]])
            line = json.dumps(comment(f"author_{author}", body)).encode() + b"\n"
            n_bytes += len(line)
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


def parse(path: Path) -> dict[str, float]:
    """Parse every line once, the least any reader must do."""
    for block in split_lines(read_blocks(path, lambda n: None)):
        for line in block:
            if line:
                json.loads(line)
    return {}


def read(path: Path) -> dict[str, float]:
    """Read the dump in two passes."""
    windows, counts = Reddit(path=str(path)).read([path])
    clients = int(windows["owners"][-1]) + 1
    return {"posts": counts.posts, "clients": clients, "samples": len(windows["train"])}


def compare(path: Path, megabytes: float, options: Options) -> Row:
    found: dict[Work, dict[str, float]] = {}

    def clock(work: Work) -> float:
        seconds, found[work] = in_fresh_process(work, path)
        return seconds

    clocks = {"parsing alone": lambda: clock(parse), "reader": lambda: clock(read)}
    times = repeat_interleaved(clocks, options.repeats, warm_up=not options.quick)
    speed = megabytes / statistics.median(times["reader"])
    notes = {"MB": path.stat().st_size / 1e6, "MB/s": speed, **found[read]}
    return Row.of(path.name, times, "reader", "parsing alone", notes)


def in_fresh_process(work: Work, path: Path) -> tuple[float, dict[str, float]]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_timed, work, path).result()


def _timed(work: Work, path: Path) -> tuple[float, dict[str, float]]:
    """Return the processor time of `work`, its counts and the peak memory in MB."""
    start = time.process_time()  # unaffected by other processes
    found = work(path)
    seconds = time.process_time() - start
    memory = {} if (peak := process_memory("VmHWM")) is None else {"memory MB": peak / 1e6}
    return seconds, memory | found
