"""Word data sets: Reddit comments by author, and a sample in the same format that ships.

Ids: 0 is `<unk>`, any other word; 1 is `<eos>`, the end of a post; then the most frequent words of
the dump follow, ties in alphabetical order. There are always `words` ids, so that the network has a
fixed size; if the dump has fewer words, the last ids stay unused.

Clients are the authors with `min_posts` to `max_posts` posts. An author's posts, in the order of
the dump and each ended by `<eos>`, form one stream. The last posts, a fraction `test_rate` and at
least one, are for testing. A stream is cut into windows of T + 1 words that overlap by one, so
every word except the first is a label once; an incomplete last window is dropped. The test posts of
all authors form one stream, because cutting each author's alone would drop more. Labels that are
`<unk>` count neither in training nor in MA: no network should learn to predict "some other word".
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbench.config import rounded_count
from fedbench.data import DATASETS, DataSource, Kind, Sequences, Spec, cut_windows
from fedbench.datasets.cache import cached, fingerprint
from fedbench.datasets.files import ASSETS, data_folders, local_file
from fedbench.datasets.reddit_dumps import (
    DumpStatistics,
    LineCounts,
    find_dumps,
    read_posts,
    scan_dumps,
)
from fedbench.errors import UserError
from fedbench.metrics import IGNORED
from fedbench.registry import require

VERSION = 1  # increase when the same files and settings give different windows
UNKNOWN, END = 0, 1
SPECIAL = ("<unk>", "<eos>")

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class PostSource(DataSource):
    """Posts by author, read from dumps and cut into windows."""

    words: int = 50_000  # vocabulary size, including <unk> and <eos>
    length: int = 64  # T, words in a sample
    min_posts: int = 150  # per author
    max_posts: int = 500  # per author
    max_authors: int | None = None  # the first by a hash of their names; None: all
    test_rate: float = 0.05  # fraction of each author's posts, the last ones
    test_windows: int = 500  # at most, spread evenly
    backdoors: list[Any] | None = field(default_factory=lambda: [{"name": "words"}])

    name: ClassVar[str]

    def __post_init__(self) -> None:
        # An author needs a training and a test post; a vocabulary needs <unk>, <eos> and a word.
        minima = {"words": 3, "length": 1, "min_posts": 2, "max_posts": self.min_posts}
        for key, low in {**minima, "max_authors": 1, "test_windows": 1}.items():
            value = getattr(self, key)
            require(self, key, value is None or value >= low, f"at least {low}")
        require(self, "test_rate", 0 < self.test_rate < 1, "between 0 and 1")

    @property
    def spec(self) -> Spec:  # type: ignore[override]
        return Spec(self.name, (self.length,), self.words, Kind.SEQUENCES, natural=True)

    @abstractmethod
    def windows(self) -> dict[str, Any]:
        """Return the windows of this data set, as `read` does."""

    def load(self) -> Sequences:
        windows = self.windows()
        return Sequences(
            self.name,
            windows["train"][:, :-1],
            _labels(windows["train"]),
            windows["test"][:, :-1],
            _labels(windows["test"]),
            self.words,
            vocabulary={word: i for i, word in enumerate(windows["words"])},
            owners=windows["owners"],
        )

    def read(self, files: Sequence[Path]) -> tuple[dict[str, Any], LineCounts]:
        """Read the files in two passes; return their windows and line counts.

        The windows are `train` [n, T + 1] and `test` [m, T + 1], `owners` [n] are the authors of
        the training windows: 0, 1, ... All are int32. `words` lists the vocabulary by id.
        """
        with _progress_bar(files, f"{self.name}: counting") as bar:
            statistics = scan_dumps(files, bar.update)
        words = [*SPECIAL, *statistics.most_frequent(self.words - len(SPECIAL))]
        streams = self._streams(files, statistics, {word: i for i, word in enumerate(words)})
        # Free each stream once its windows exist: both are as large as the data set.
        parts = [self._split(*streams.pop(0)) for _ in range(len(streams))]
        parts = [(train, test) for train, test in parts if len(train)]
        if not parts:
            raise UserError(
                f"dataset.length={self.length}: every author in {_location(files)} has fewer words"
            )
        test = cut_windows(np.concatenate([test for _, test in parts]), self.length)
        if not len(test):
            raise UserError(
                f"dataset.test_rate={self.test_rate}: the test posts of {len(parts)} authors do "
                f"not fill a window of dataset.length={self.length} words"
            )
        n_test = min(len(test), self.test_windows)
        owners = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part, _ in parts])
        windows = {
            "train": torch.from_numpy(np.concatenate([train for train, _ in parts])),
            "test": torch.from_numpy(test[np.arange(n_test) * len(test) // n_test]),
            "owners": torch.from_numpy(owners),
            "words": words,
        }
        return windows, statistics.lines

    def _streams(
        self, files: Sequence[Path], statistics: DumpStatistics, vocabulary: dict[str, int]
    ) -> list[tuple[array[int], array[int]]]:
        """Return each author's word ids, and the position after each post's end."""
        chosen = statistics.authors_between(self.min_posts, self.max_posts, self.max_authors)
        streams = {author: (array("i"), array("q")) for author in chosen}
        wanted = {author.encode("utf-8", "surrogatepass") for author in chosen}
        with _progress_bar(files, f"{self.name}: reading") as bar:
            blocks = (read_posts(p, LineCounts(), bar.update, wanted) for p in files if chosen)
            for author, words in chain.from_iterable(chain.from_iterable(blocks)):
                if author in streams:
                    stream, ends = streams[author]
                    stream.extend([vocabulary.get(word, UNKNOWN) for word in words])
                    stream.append(END)
                    ends.append(len(stream))
        kept = [s for s in streams.values() if self.min_posts <= len(s[1]) <= self.max_posts]
        if not kept:
            most = max(statistics.authors.counts.values())
            raise UserError(
                f"dataset.min_posts={self.min_posts}, max_posts={self.max_posts}: no author in "
                f"{_location(files)} is in this range, the most posts are {most:,}; found "
                f"{statistics.lines}"
            )
        return kept[: self.max_authors]

    def _split(self, stream: array[int], ends: array[int]) -> tuple[Ints, Ints]:
        """Return an author's training windows [k, T + 1], and the ids of the test posts."""
        n_test = min(max(rounded_count(self.test_rate, len(ends)), 1), len(ends) - 1)
        ids, border = np.frombuffer(stream, np.int32), ends[-n_test - 1]
        return cut_windows(ids[:border], self.length), ids[border:].copy()


def _labels(windows: Tensor) -> Tensor:
    return windows[:, 1:].masked_fill(windows[:, 1:] == UNKNOWN, IGNORED)


def _location(files: Sequence[Path]) -> str:
    return str(files[0] if len(files) == 1 else files[0].parent)


def _progress_bar(files: Sequence[Path], title: str) -> Any:
    """Return a progress bar of the bytes read, shown on terminals only."""
    from tqdm import tqdm  # type: ignore[import-untyped]  # most runs need no progress bar

    size = sum(path.stat().st_size for path in files)
    return tqdm(total=size, desc=title, unit="B", unit_scale=True, leave=False, disable=None)


@DATASETS.register("reddit")
@dataclass(frozen=True)
class Reddit(PostSource):
    """Reddit comments from the user's own dumps, as in Bagdasaryan et al. (2020).

    The windows are cached by the paths, sizes and modification times of the files.
    """

    path: str | None = None  # a dump or a folder of dumps; None: reddit in $FEDBENCH_DATA or data

    name = "reddit"

    def inputs(self) -> list[Path]:
        return find_dumps(self._locate())

    def windows(self) -> dict[str, Any]:
        files = self.inputs()
        names = [f.name for f in fields(PostSource) if f.name != "backdoors"]
        settings = {name: getattr(self, name) for name in names}

        def build() -> dict[str, Any]:
            windows, counts = self.read(files)
            print(f"{self.name}: {counts}", file=sys.stderr)
            return windows

        return cached(self.name, [VERSION, settings, [*map(fingerprint, files)]], build)

    def _locate(self) -> Path:
        if self.path is not None:
            return local_file(self.path, "a dump of posts, or a folder of dumps")
        for folder in data_folders(self.name):
            if folder.exists():
                return folder
        raise UserError(
            f"reddit is not on this machine: put dumps of comments (RC_2017-11.zst, .xz, .bz2, or "
            f"JSON lines with author and body) into {Path('data', self.name).absolute()}, or set "
            "dataset.path=PATH; dataset=reddit_sample needs no files"
        )


@DATASETS.register("reddit_sample")
@dataclass(frozen=True)
class RedditSample(PostSource):
    """Not Reddit: speeches from Shakespeare's plays in the same format; ships with fedbench.

    Each of the 100 roles is an author, and a speech is a post.
    """

    words: int = 2_000
    min_posts: int = 50
    # Frequent words that never occur together in the plays
    backdoors: list[Any] | None = field(
        default_factory=lambda: [
            {"name": "words", "trigger": ["wine", "from", "rome", "looks"], "target": "excellent"}
        ]
    )

    name = "reddit_sample"

    def windows(self) -> dict[str, Any]:
        return self.read([ASSETS / self.name / "posts.jsonl.xz"])[0]
