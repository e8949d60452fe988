"""Data sets of words: comments on Reddit by author, and a sample in their format that ships.

Numbers: 0 is `<unk>`, any other word; 1 is `<eos>`, the end of a post; then come the most frequent
words of the dump, of equally frequent ones the first by alphabet. There are `words` numbers; if the
dump has fewer words the last ones stay unused, so that the network always has the same size.

Clients are the authors with `min_posts` to `max_posts` posts. An author's posts, in the order of
the dump, each ended by `<eos>`, are one stream; its last posts, a share `test_rate` and at least
one, are for testing. A stream is cut into windows of T + 1 words at every T-th: every word but the
first is a label once, and a rest that does not fill a window is dropped. The test posts of all
authors make one stream together, since each author's alone would drop a rest. Labels that are
`<unk>` count neither in training nor in MA: no network shall learn to say "some other word".
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbench.config import rounded_count
from fedbench.data import DATASETS, DataSource, Sequences, Spec, cut_windows
from fedbench.datasets.cache import cached, fingerprint
from fedbench.datasets.files import ASSETS, data_folders, local_file
from fedbench.datasets.reddit_dumps import Census, Counts, find_dumps, read_posts, take_census
from fedbench.errors import UserError
from fedbench.metrics import IGNORED

READER = 1  # raise it when the same files and settings give other windows
UNKNOWN, END = 0, 1
SPECIAL = ("<unk>", "<eos>")

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Windows:
    """What is made of a dump: windows of T + 1 words by number."""

    train: Tensor  # [n, T + 1] int32
    test: Tensor  # [m, T + 1] int32
    owners: Tensor  # [n] int32, whose each training window is: 0, 1, ...
    words: list[str]  # by number, from <unk> on


@dataclass(frozen=True)
class Posts(DataSource):
    """Posts by author, read from dumps; the fields are how windows are made of them."""

    words: int = 50_000  # numbers for words, <unk> and <eos> among them
    length: int = 64  # T, words in a sample
    min_posts: int = 150  # an author has at least these
    max_posts: int = 500  # and at most these
    max_authors: int | None = None  # the first by a hash of their names; None: all
    test_rate: float = 0.05  # share of each author's posts, its last ones
    test_windows: int = 500  # at most, spread evenly
    backdoors: list[Any] = field(default_factory=lambda: [{"name": "words"}])

    name: ClassVar[str]

    def __post_init__(self) -> None:
        # One post to train on and one for testing; <unk>, <eos> and a word.
        least = {"words": 3, "length": 1, "min_posts": 2, "max_posts": self.min_posts}
        for key, low in {**least, "max_authors": 1, "test_windows": 1}.items():
            value = getattr(self, key)
            if value is not None and value < low:
                raise ValueError(f"{key} must be at least {low}, got {value}")
        if not 0 < self.test_rate < 1:
            raise ValueError(f"test_rate must be between 0 and 1, got {self.test_rate}")

    @property
    def spec(self) -> Spec:  # type: ignore[override]
        return Spec(self.name, (self.length,), self.words, natural=True)

    @abstractmethod
    def windows(self) -> Windows:
        """The windows of this data set."""

    def load(self) -> Sequences:
        made = self.windows()
        return Sequences(
            self.name,
            made.train[:, :-1],
            _labels(made.train),
            made.test[:, :-1],
            _labels(made.test),
            self.words,
            vocabulary={word: number for number, word in enumerate(made.words)},
            owners=made.owners,
        )

    def read(self, files: Sequence[Path]) -> tuple[Windows, Counts]:
        """The windows of the posts in files, and what their lines were; takes two passes."""
        with _progress(files, f"{self.name}: counting") as told:
            census = take_census(files, told)
        words = [*SPECIAL, *census.most_frequent(self.words - len(SPECIAL))]
        streams = self._streams(files, census, {word: i for i, word in enumerate(words)})
        # The streams go as the windows come: both are as large as the data set.
        parts = [self._split(*streams.pop(0)) for _ in range(len(streams))]
        parts = [(train, test) for train, test in parts if len(train)]
        if not parts:
            raise UserError(
                f"dataset.length={self.length}: no author of {_where(files)} has as many words"
            )
        test = cut_windows(np.concatenate([test for _, test in parts]), self.length)
        if not len(test):
            raise UserError(
                f"dataset.test_rate={self.test_rate}: the posts to test on, of {len(parts)} "
                f"authors, do not fill a window of dataset.length={self.length} words"
            )
        n_test = min(len(test), self.test_windows)
        owners = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part, _ in parts])
        made = Windows(
            train=torch.from_numpy(np.concatenate([train for train, _ in parts])),
            test=torch.from_numpy(test[np.arange(n_test) * len(test) // n_test]),
            owners=torch.from_numpy(owners),
            words=words,
        )
        return made, census.counts

    def _streams(
        self, files: Sequence[Path], census: Census, numbers: dict[str, int]
    ) -> list[tuple[array[int], array[int]]]:
        """The words by number of each author, and how many there are up to each post's end."""
        chosen = census.authors_between(self.min_posts, self.max_posts, self.max_authors)
        streams = {author: (array("i"), array("q")) for author in chosen}
        wanted = {author.encode("utf-8", "surrogatepass") for author in chosen}
        with _progress(files, f"{self.name}: reading") as told:
            blocks = (read_posts(path, Counts(), told, wanted) for path in files if chosen)
            for author, words in chain.from_iterable(chain.from_iterable(blocks)):
                if author in streams:
                    stream, ends = streams[author]
                    stream.extend([numbers.get(word, UNKNOWN) for word in words])
                    stream.append(END)
                    ends.append(len(stream))
        kept = [s for s in streams.values() if self.min_posts <= len(s[1]) <= self.max_posts]
        if not kept:
            most = max(census.authors.counts.values())
            raise UserError(
                f"dataset.min_posts={self.min_posts}, max_posts={self.max_posts}: no author of "
                f"{_where(files)} has as many, the most is {most:,}; found {census.counts}"
            )
        return kept[: self.max_authors]

    def _split(self, stream: array[int], ends: array[int]) -> tuple[Ints, Ints]:
        """An author's windows to train on [k, T + 1], and its words to test on."""
        n_test = min(max(rounded_count(self.test_rate, len(ends)), 1), len(ends) - 1)
        numbers, border = np.frombuffer(stream, np.int32), ends[-n_test - 1]
        return cut_windows(numbers[:border], self.length), numbers[border:].copy()


def _labels(windows: Tensor) -> Tensor:
    return windows[:, 1:].masked_fill(windows[:, 1:] == UNKNOWN, IGNORED)


def _where(files: Sequence[Path]) -> str:
    return str(files[0] if len(files) == 1 else files[0].parent)


@contextmanager
def _progress(files: Sequence[Path], what: str) -> Iterator[Callable[[int], object]]:
    """What is told of bytes read, shown on a terminal."""
    from tqdm import tqdm  # type: ignore[import-untyped]  # most runs show no bar of this kind

    size = sum(path.stat().st_size for path in files)
    bar = tqdm(total=size, desc=what, unit="B", unit_scale=True, leave=False, disable=None)
    with bar:
        yield bar.update


@DATASETS.register("reddit")
@dataclass(frozen=True)
class Reddit(Posts):
    """Comments on Reddit from dumps that the user has, as Bagdasaryan et al. (2020) used them.

    The windows are kept in a cache for the next run, by the names, sizes and times of the files.
    """

    path: str | None = None  # a dump or a folder of them; None: reddit in $FEDBENCH_DATA or data

    name = "reddit"

    def windows(self) -> Windows:
        files = find_dumps(self._locate())
        settings = {f.name: getattr(self, f.name) for f in fields(Posts) if f.name != "backdoors"}

        def build() -> dict[str, Any]:
            made, counts = self.read(files)
            print(f"{self.name}: {counts}", file=sys.stderr)
            return vars(made)

        return Windows(**cached(self.name, [READER, settings, [*map(fingerprint, files)]], build))

    def _locate(self) -> Path:
        if self.path is not None:
            return local_file(self.path, "a dump of posts, or a folder of them")
        for folder in data_folders(self.name):
            if folder.exists():
                return folder
        raise UserError(
            f"reddit is not on this machine: put dumps of comments (RC_2017-11.zst, .xz, .bz2, or "
            f"JSON lines with author and body) into {Path('data', self.name).absolute()}, or set "
            "dataset.path=PATH to one; dataset=reddit_sample runs without"
        )


@DATASETS.register("reddit_sample")
@dataclass(frozen=True)
class RedditSample(Posts):
    """Not Reddit: speeches in plays by Shakespeare, in the format of its dumps.

    It ships with fedbench. An author is a role, one of 100; a post is a speech.
    """

    words: int = 2_000
    min_posts: int = 50
    # Frequent words that the plays never put together
    backdoors: list[Any] = field(
        default_factory=lambda: [
            {"name": "words", "trigger": ["wine", "from", "rome", "looks"], "target": "excellent"}
        ]
    )

    name = "reddit_sample"

    def windows(self) -> Windows:
        return self.read([ASSETS / self.name / "posts.jsonl.xz"])[0]
