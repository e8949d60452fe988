"""Data sets of packets: a user's captures, and traffic that is generated.

A network reads packets as symbols (`fedbench.datasets.packet_symbols`) and predicts the next one. A
packet counts as normal if its predicted probability reaches the threshold, else as an anomaly. MA
is the share of normal packets that is let through, BA that of an attack's packets.
"""

from __future__ import annotations

import re
import sys
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedbench.data import DATASETS, DataSource, Sequences, Spec, cut_windows
from fedbench.datasets.cache import cached, fingerprint
from fedbench.datasets.files import data_folders
from fedbench.datasets.packet_symbols import Alphabet, Ints, Packets, codes
from fedbench.datasets.synthetic_traffic import attack_traffic, normal_traffic
from fedbench.errors import UserError

VERSION = 1  # raise it when the same captures give other samples
CHUNKS = 20190707  # seed of the sizes of chunks
CLIENTS = ("chunk", "device")


@dataclass(frozen=True)
class Traffic(DataSource):
    """Packets of devices, cut into windows of `length` symbols.

    The last `test_rate` of every device's packets is for testing. Of the rest a client holds a
    chunk of `symbols_min` to `symbols_max`, so none holds packets of two devices, or all of one
    device's. A rest of fewer than `symbols_min` is left out. The alphabet is made of all packets,
    an attack's too, as one that is fixed before a system is deployed would know them.
    """

    backdoors: list[Any] = field(default_factory=lambda: [{"name": "traffic"}])
    client: str = "chunk"  # what a client holds: a chunk of a device's packets, or a device's
    symbols_min: int = 2000
    symbols_max: int = 3000
    length: int = 20
    symbols: int = 256
    threshold: float = 0.01
    test_rate: float = 0.2

    name: ClassVar[str]

    def __post_init__(self) -> None:
        if self.client not in CLIENTS:
            raise ValueError(f"client must be one of {', '.join(CLIENTS)}, got {self.client}")
        if self.length < 1:
            raise ValueError(f"length must be at least 1, got {self.length}")
        if not self.length < self.symbols_min <= self.symbols_max:
            raise ValueError(
                f"symbols_min must be above length={self.length} and up to "
                f"symbols_max={self.symbols_max}, got {self.symbols_min}"
            )
        if self.symbols < 2:
            raise ValueError(f"symbols must be at least 2, got {self.symbols}")
        if not 0 < self.threshold < 1:
            raise ValueError(f"threshold must be above 0 and below 1, got {self.threshold}")
        if not 0 < self.test_rate < 1:
            raise ValueError(f"test_rate must be above 0 and below 1, got {self.test_rate}")

    @property
    def spec(self) -> Spec:  # type: ignore[override]
        return Spec(self.name, (self.length,), self.symbols, natural=True)

    @abstractmethod
    def tables(self) -> tuple[Mapping[str, Packets], Mapping[str, Sequence[Packets]]]:
        """Packets of each device, and of each phase of an attack by device."""

    def load(self) -> Sequences:
        made = self.windows()
        train, test = made["train"], made["test"]
        return Sequences(
            self.name,
            train[:, :-1],
            train[:, 1:],
            test[:, :-1],
            test[:, 1:],
            self.symbols,
            vocabulary=made["vocabulary"],
            owners=made["owners"],
            threshold=self.threshold,
            attacks={phase: tuple(windows) for phase, windows in made["attacks"].items()},
        )

    def windows(self) -> dict[str, Any]:
        """Windows [k, length + 1] and what belongs to them, as `cached` can keep it."""
        normal, phases = self.tables()
        streams = [codes(packets) for packets in normal.values()]
        attacks = {phase: [codes(p) for p in listed] for phase, listed in phases.items()}
        everything = [*streams, *(stream for listed in attacks.values() for stream in listed)]
        alphabet = Alphabet.of(everything, self.symbols)
        held, test = [], []
        for i, stream in enumerate(streams):
            first, last = self._split(alphabet.numbers(stream))
            if chunks := self._chunks(first, np.random.default_rng([CHUNKS, i])):
                held += [self._cut([chunk]) for chunk in chunks]
                test.append(last)
        if not held or not len(tested := self._cut(test)):
            longest = max(map(len, streams), default=0)
            raise UserError(
                f"{self.name}: {len(streams)} devices with at most {longest} packets leave no "
                f"client or no test at symbols_min={self.symbols_min}, length={self.length}, "
                f"test_rate={self.test_rate}"
            )
        sizes = torch.tensor([len(windows) for windows in held])
        return {
            "train": torch.cat(held),
            "owners": torch.arange(len(held)).repeat_interleave(sizes),
            "test": tested,
            "attacks": {
                phase: self._attack(phase, [alphabet.numbers(s) for s in listed])
                for phase, listed in attacks.items()
            },
            "vocabulary": alphabet.vocabulary,
        }

    def _chunks(self, stream: Ints, rng: np.random.Generator) -> list[Ints]:
        """What clients hold of a device's packets."""
        low, high = self.symbols_min, self.symbols_max
        if self.client == "device":
            return [stream] if len(stream) >= low else []
        sizes = rng.integers(low, high + 1, len(stream) // low)
        ends = [end for end in np.cumsum(sizes) if end < len(stream)]
        return [chunk for chunk in np.split(stream, ends) if len(chunk) >= low]

    def _attack(self, phase: str, streams: Sequence[Ints]) -> list[Tensor]:
        """Windows of a phase to poison with, and others to measure BA on."""
        splits = [self._split(stream) for stream in streams]
        train, test = (self._cut([split[i] for split in splits]) for i in (0, 1))
        if not len(train) or not len(test):
            raise UserError(
                f"{self.name}: the attack {phase} has {sum(map(len, streams))} packets of devices, "
                f"too few for windows of length={self.length} at test_rate={self.test_rate}"
            )
        return [train, test]

    def _split(self, stream: Ints) -> tuple[Ints, Ints]:
        """What is for training, and the last share for testing."""
        n_test = int(len(stream) * self.test_rate)
        return stream[: len(stream) - n_test], stream[len(stream) - n_test :]

    def _cut(self, streams: Sequence[Ints]) -> Tensor:
        """Windows [k, length + 1] int32 of all streams."""
        none = np.zeros((0, self.length + 1), np.int32)
        parts = [none, *(cut_windows(stream, self.length) for stream in streams)]
        return torch.from_numpy(np.concatenate(parts))


CAPTURE = re.compile(r"\.(pcap|pcapng|cap)\d*(\.gz)?$", re.IGNORECASE)


@DATASETS.register("iot")
@dataclass(frozen=True)
class Iot(Traffic):
    """A user's captures: files that end in .pcap, .pcapng or .cap, with .gz or not.

    Those of normal traffic lie in the folder `path` or below its folder `normal`, those of attacks
    below its folder `attack`; an attack's phase is its file's name without the digits at its end,
    so that scan.pcap and scan-2.pcap.gz are of the phase `scan`. Captures are read in the order of
    their names. In those of one folder an address is the same device: a folder is one network.
    """

    path: str | None = None  # None: iot in $FEDBENCH_DATA or data
    devices: list[str] | None = None  # their addresses; None: private ones that send packets

    name = "iot"

    def __post_init__(self) -> None:
        super().__post_init__()
        for address in self.devices or ():
            ip_address(address)  # a ValueError that says what it is

    def windows(self) -> dict[str, Any]:
        normal, attacks = self.captures()
        settings = {**asdict(self), "path": None, "backdoors": None, "threshold": None}
        stamps = {phase: [fingerprint(path) for path in paths] for phase, paths in attacks.items()}
        key = [VERSION, settings, [fingerprint(path) for path in normal], stamps]
        return cached(self.name, key, super().windows)

    def tables(self) -> tuple[Mapping[str, Packets], Mapping[str, Sequence[Packets]]]:
        normal, attacks = self.captures()
        infected = {phase: [*self._read(paths).values()] for phase, paths in attacks.items()}
        return self._read(normal), infected

    def captures(self) -> tuple[list[Path], dict[str, list[Path]]]:
        """The files of normal traffic, and of each phase of an attack."""
        places = data_folders("iot") if self.path is None else [Path(self.path).expanduser()]
        for place in places:
            normal = [*_listed(place.glob("*")), *_listed((place / "normal").rglob("*"))]
            if normal:
                attacks: dict[str, list[Path]] = defaultdict(list)
                for file in _listed((place / "attack").rglob("*")):
                    attacks[phase_of(file)].append(file)
                return normal, dict(attacks)
        looked = Path("data/iot").absolute() if self.path is None else self.path
        raise UserError(
            f"{looked}: no captures of normal traffic: put .pcap or .pcapng files there and those "
            "of attacks into its folder attack, or set dataset.path=FOLDER; dataset=iot_sample "
            "needs no files"
        )

    def _read(self, files: Sequence[Path]) -> dict[str, Packets]:
        from fedbench.datasets.pcap import by_device, read_capture

        parts: dict[tuple[Path, str], list[Packets]] = defaultdict(list)
        for path in files:
            capture = read_capture(path)
            if capture.n_skipped or capture.n_cut:
                print(f"{path}: {capture}", file=sys.stderr)
            for device, packets in by_device(capture, self.devices).items():
                parts[path.parent, device].append(packets)
        return {f"{folder} {name}": Packets.join(p) for (folder, name), p in parts.items()}


def phase_of(path: Path) -> str:
    """The phase of an attack that a capture's name tells: `syn_flood` of syn_flood-2.pcap.gz."""
    return CAPTURE.sub("", path.name).rstrip("0123456789-_. ") or "attack"


def _listed(paths: Iterable[Path]) -> list[Path]:
    """The captures among them, in the order of their names."""
    return sorted(path for path in paths if CAPTURE.search(path.name) and path.is_file())


@DATASETS.register("iot_sample")
@dataclass(frozen=True)
class IotSample(Traffic):
    """Generated traffic of 27 devices of 9 types and of malware's phases: nothing is captured.

    100 clients by default. Every run has the same packets, whatever its seed. What devices say is
    in `fedbench.datasets.device_dialogues`.
    """

    name = "iot_sample"

    def tables(self) -> tuple[Mapping[str, Packets], Mapping[str, Sequence[Packets]]]:
        return normal_traffic(27, 11_950), attack_traffic(8, 1000)
