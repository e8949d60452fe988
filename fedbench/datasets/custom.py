"""The user's own data set: a function, a LightningDataModule, a folder of images, .npz or .pt.

docs/own-dataset.md explains each form. Readers return `UserArrays`, which are checked and turned
into a `Dataset`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from fedbench.data import DATASETS, Dataset, DataSource
from fedbench.datasets.custom_arrays import KINDS, ArrayOptions, dataset_of
from fedbench.datasets.custom_readers import (
    SourceError,
    UserArrays,
    arrays_of,
    is_data_module,
    read_archive,
    read_data_module,
    read_folder,
)
from fedbench.errors import UserError
from fedbench.registry import require
from fedbench.rng import seeded
from fedbench.user_code import DOTTED, IN_FILE, UserCode, absolute

LARGEST_SIDE = 4096  # pixels of a resized image
ARCHIVES = (".npz", ".pt", ".pth")
FORMS = (
    "path/to/file.py:load, my_package.my_module.load, a folder of images, "
    "or a file that ends with .npz or .pt"
)


@DATASETS.register("custom")
@dataclass(frozen=True)
class CustomData(DataSource):
    """The user's own samples, read from one source."""

    source: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)  # of a function or data module
    test_rate: float = 0.2  # fraction of each class for testing, if the source has no test set
    split_seed: int = 0  # of that split; the run's seed does not change it
    kind: str | None = None  # images, features or sequences; None: by shape and type
    size: list[int] | None = None  # [height, width] to resize a folder's images to
    pixel_range: list[float] | None = None  # of other pixels than bytes or floats 0..1
    standardize: bool = True  # by mean and standard deviation of the training set
    backdoors: list[Any] | None = None

    def __post_init__(self) -> None:
        """Check the settings and find the source, before anything is loaded."""
        if self.source is None:
            raise ValueError(f"source must be set: {FORMS}")
        require(self, "test_rate", 0 < self.test_rate < 1, "above 0 and below 1")
        require(self, "split_seed", self.split_seed >= 0, "0 or more")
        valid = self.kind is None or self.kind in KINDS
        require(self, "kind", valid, f"one of {', '.join(KINDS)}, or null")
        valid = self.size is None or (
            len(self.size) == 2 and min(self.size) >= 1 and max(self.size) <= LARGEST_SIDE
        )
        rule = f"[height, width] in pixels, up to {LARGEST_SIDE}, or null"
        require(self, "size", valid, rule)
        ends = self.pixel_range
        valid = ends is None or (len(ends) == 2 and ends[0] < ends[1])
        require(self, "pixel_range", valid, "[lowest, highest], or null")
        if self._is_code:
            self._code.check_arguments(self._loaded_code())
        else:
            self._check_path()

    def inputs(self) -> Iterable[Path | ModuleType]:
        return self._code.modules() if self._is_code else [self._path]

    def load(self) -> Dataset:
        options = ArrayOptions(
            self.kind, self.pixel_range, self.standardize, self.test_rate, self.split_seed
        )
        try:
            content = self._call() if self._is_code else self._read()
            return (
                content if isinstance(content, Dataset) else dataset_of("custom", content, options)
            )
        except (ValueError, SourceError) as error:
            raise UserError(f"dataset.source={self.source}: {error}") from error

    def _read(self) -> UserArrays:
        is_folder = self._path.is_dir()
        return read_folder(self._path, self.size) if is_folder else read_archive(self._path)

    def _call(self) -> UserArrays | Dataset:
        """Call the user's function or data module; seeded, so that all runs see the same data."""
        code, function = self._code, self._loaded_code()
        with seeded(self.split_seed):
            made = code.call(function)
            if is_data_module(made):
                made = code.guarded(read_data_module, made)
        return made if isinstance(made, Dataset | UserArrays) else arrays_of(made)

    def _loaded_code(self) -> Callable[..., Any]:
        def is_data(made: type) -> bool:
            return issubclass(made, tuple | Mapping | Dataset | UserArrays) or is_data_module(made)

        return self._code.load("a LightningDataModule", is_data_module, is_data)

    def _check_path(self) -> None:
        if self.arguments:
            key, value = next(iter(self.arguments.items()))
            raise UserError(
                f"dataset.arguments.{key}={value}: only a function or a LightningDataModule has "
                f"arguments, not dataset.source={self.source}"
            )
        path = self._path
        if not path.exists():
            raise UserError(f"dataset.source={self.source}: no {path}; expected {FORMS}")
        if not path.is_dir() and not (path.is_file() and path.suffix in ARCHIVES):
            raise UserError(f"dataset.source={self.source}: must be {FORMS}")
        if self.size is not None and not path.is_dir():
            raise UserError(f"dataset.size={self.size}: resizes a folder of images only")

    @property
    def _is_code(self) -> bool:
        """Whether the source is imported; an existing folder or archive is not."""
        source = str(self.source)
        if IN_FILE.fullmatch(source) or source.endswith(".py"):
            return True
        is_archive = source.endswith(ARCHIVES)
        return bool(DOTTED.fullmatch(source)) and not is_archive and not self._path.exists()

    @property
    def _path(self) -> Path:
        return absolute(str(self.source))

    @property
    def _code(self) -> UserCode:
        return UserCode("dataset.source", str(self.source), self.arguments, example="load")
