"""Packet data sets: the user's captures, and synthetic traffic.

A network reads packets as symbols (`fedbench.datasets.packet_symbols`) and predicts the next one. A
packet counts as normal if its predicted probability is at least the threshold, otherwise as an
anomaly. MA is the fraction of normal packets accepted as normal, BA that of attack packets.
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

from fedbench.data import DATASETS, DataSource, Kind, Sequences, Spec, cut_windows
from fedbench.datasets.cache import cached, fingerprint
from fedbench.datasets.files import data_folders
from fedbench.datasets.packet_symbols import Alphabet, Ints, Packets, symbol_codes
from fedbench.datasets.synthetic_traffic import attack_traffic, normal_traffic
from fedbench.errors import UserError
from fedbench.registry import require

VERSION = 1  # increase when the same captures give different samples
CHUNK_SEED = 20190707
CLIENTS = ("chunk", "device")

# Packets by device, and for every attack phase the packets of each infected device
Traffic = tuple[Mapping[str, Packets], Mapping[str, Sequence[Packets]]]


@dataclass(frozen=True)
class TrafficSource(DataSource):
    """Packets of devices, cut into windows of `length` symbols.

    The last fraction `test_rate` of every device's packets is for testing. A client holds either a
    chunk of `symbols_min` to `symbols_max` training packets of one device, or all of them. Fewer
    than `symbols_min` remaining packets are dropped. The alphabet covers all packets, including
    attacks, like an alphabet fixed before deployment would.
    """

    backdoors: list[Any] | None = field(default_factory=lambda: [{"name": "traffic"}])
    client: str = "chunk"  # holds a chunk of one device's packets; "device": all of them
    symbols_min: int = 2000
    symbols_max: int = 3000
    length: int = 20
    symbols: int = 256
    threshold: float = 0.01
    test_rate: float = 0.2

    name: ClassVar[str]

    def __post_init__(self) -> None:
        require(self, "client", self.client in CLIENTS, f"one of {', '.join(CLIENTS)}")
        require(self, "length", self.length >= 1, "at least 1")
        rule = f"above length={self.length} and at most symbols_max={self.symbols_max}"
        require(self, "symbols_min", self.length < self.symbols_min <= self.symbols_max, rule)
        require(self, "symbols", self.symbols >= 2, "at least 2")
        for key in ("threshold", "test_rate"):
            require(self, key, 0 < getattr(self, key) < 1, "above 0 and below 1")

    @property
    def spec(self) -> Spec:  # type: ignore[override]
        return Spec(self.name, (self.length,), self.symbols, Kind.SEQUENCES, natural=True)

    @abstractmethod
    def traffic(self) -> Traffic:
        """Return normal and attack packets."""

    def load(self) -> Sequences:
        windows = self.windows()
        train, test = windows["train"], windows["test"]
        return Sequences(
            self.name,
            train[:, :-1],
            train[:, 1:],
            test[:, :-1],
            test[:, 1:],
            self.symbols,
            vocabulary=windows["vocabulary"],
            owners=windows["owners"],
            threshold=self.threshold,
            attacks={phase: tuple(parts) for phase, parts in windows["attacks"].items()},
        )

    def windows(self) -> dict[str, Any]:
        """Return windows [k, length + 1], owners and vocabulary, in types that `cached` accepts."""
        normal, phases = self.traffic()
        streams = [symbol_codes(packets) for packets in normal.values()]
        attacks = {phase: [symbol_codes(p) for p in parts] for phase, parts in phases.items()}
        everything = [*streams, *(stream for parts in attacks.values() for stream in parts)]
        alphabet = Alphabet.from_streams(everything, self.symbols)
        clients, tests = [], []
        for i, stream in enumerate(streams):
            train, test = self._split(alphabet.encode(stream))
            if chunks := self._chunks(train, np.random.default_rng([CHUNK_SEED, i])):
                clients += [self._windows([chunk]) for chunk in chunks]
                tests.append(test)
        test_windows = self._windows(tests)
        if not clients or not len(test_windows):
            longest = max(map(len, streams), default=0)
            raise UserError(
                f"{self.name}: {len(streams)} devices with at most {longest} packets give no "
                f"client or no test window at symbols_min={self.symbols_min}, "
                f"length={self.length}, test_rate={self.test_rate}"
            )
        sizes = torch.tensor([len(windows) for windows in clients])
        return {
            "train": torch.cat(clients),
            "owners": torch.arange(len(clients)).repeat_interleave(sizes),
            "test": test_windows,
            "attacks": {
                phase: self._attack(phase, [alphabet.encode(stream) for stream in parts])
                for phase, parts in attacks.items()
            },
            "vocabulary": alphabet.vocabulary,
        }

    def _chunks(self, stream: Ints, rng: np.random.Generator) -> list[Ints]:
        """Divide one device's packets among clients."""
        low, high = self.symbols_min, self.symbols_max
        if self.client == "device":
            return [stream] if len(stream) >= low else []
        sizes = rng.integers(low, high + 1, len(stream) // low)
        ends = [end for end in np.cumsum(sizes) if end < len(stream)]
        return [chunk for chunk in np.split(stream, ends) if len(chunk) >= low]

    def _attack(self, phase: str, streams: Sequence[Ints]) -> list[Tensor]:
        """Return a phase's windows for poisoning, and others for measuring BA."""
        splits = [self._split(stream) for stream in streams]
        train, test = (self._windows([split[i] for split in splits]) for i in (0, 1))
        if not len(train) or not len(test):
            raise UserError(
                f"{self.name}: attack {phase} has {sum(map(len, streams))} device packets, too few "
                f"for windows of length={self.length} at test_rate={self.test_rate}"
            )
        return [train, test]

    def _split(self, stream: Ints) -> tuple[Ints, Ints]:
        """Split into training and test packets; the last ones are for testing."""
        n_test = int(len(stream) * self.test_rate)
        return stream[: len(stream) - n_test], stream[len(stream) - n_test :]

    def _windows(self, streams: Sequence[Ints]) -> Tensor:
        """Cut all streams into windows [k, length + 1] int32."""
        none = np.zeros((0, self.length + 1), np.int32)
        parts = [none, *(cut_windows(stream, self.length) for stream in streams)]
        return torch.from_numpy(np.concatenate(parts))


CAPTURE = re.compile(r"\.(pcap|pcapng|cap)\d*(\.gz)?$", re.IGNORECASE)


@DATASETS.register("iot")
@dataclass(frozen=True)
class Iot(TrafficSource):
    """The user's captures: .pcap, .pcapng or .cap files, plain or .gz.

    Captures of normal traffic are in the folder `path` or below its subfolder `normal`; captures of
    attacks are below its subfolder `attack`. An attack's phase is the file name without trailing
    digits: scan.pcap and scan-2.pcap.gz belong to phase `scan`. Captures are read in name order. A
    folder is one network: within it, an address always means the same device.
    """

    path: str | None = None  # None: iot in $FEDBENCH_DATA or data
    devices: list[str] | None = None  # addresses; None: all private addresses that send packets

    name = "iot"

    def __post_init__(self) -> None:
        super().__post_init__()
        for address in self.devices or ():
            ip_address(address)  # raises a ValueError that names it

    def inputs(self) -> list[Path]:
        normal, attacks = self.captures()
        return [*normal, *(file for files in attacks.values() for file in files)]

    def windows(self) -> dict[str, Any]:
        normal, attacks = self.captures()
        settings = {**asdict(self), "path": None, "backdoors": None, "threshold": None}
        attack_files = {phase: [*map(fingerprint, paths)] for phase, paths in attacks.items()}
        key = [VERSION, settings, [*map(fingerprint, normal)], attack_files]
        return cached(self.name, key, super().windows)

    def traffic(self) -> Traffic:
        normal, attacks = self.captures()
        infected = {phase: [*self._read(paths).values()] for phase, paths in attacks.items()}
        return self._read(normal), infected

    def captures(self) -> tuple[list[Path], dict[str, list[Path]]]:
        """Return the files of normal traffic, and of each attack phase."""
        folders = data_folders("iot") if self.path is None else [Path(self.path).expanduser()]
        for folder in folders:
            normal = [*_captures(folder.glob("*")), *_captures((folder / "normal").rglob("*"))]
            if normal:
                attacks: dict[str, list[Path]] = defaultdict(list)
                for file in _captures((folder / "attack").rglob("*")):
                    attacks[phase_of(file)].append(file)
                return normal, dict(attacks)
        searched = Path("data/iot").absolute() if self.path is None else self.path
        raise UserError(
            f"{searched}: no captures of normal traffic: put .pcap or .pcapng files there and "
            "attack captures into its subfolder attack, or set dataset.path=FOLDER; "
            "dataset=iot_sample needs no files"
        )

    def _read(self, files: Sequence[Path]) -> dict[str, Packets]:
        from fedbench.datasets.pcap import packets_by_device, read_capture

        parts: dict[tuple[Path, str], list[Packets]] = defaultdict(list)
        for path in files:
            capture = read_capture(path)
            if capture.n_skipped or capture.truncated:
                print(f"{path}: {capture}", file=sys.stderr)
            for device, packets in packets_by_device(capture, self.devices).items():
                parts[path.parent, device].append(packets)
        return {f"{folder} {name}": np.concatenate(p) for (folder, name), p in parts.items()}


def phase_of(path: Path) -> str:
    """Return the attack phase in a file name, e.g. `syn_flood` for syn_flood-2.pcap.gz."""
    return CAPTURE.sub("", path.name).rstrip("0123456789-_. ") or "attack"


def _captures(paths: Iterable[Path]) -> list[Path]:
    """Return the captures among `paths`, sorted."""
    return sorted(path for path in paths if CAPTURE.search(path.name) and path.is_file())


@DATASETS.register("iot_sample")
@dataclass(frozen=True)
class IotSample(TrafficSource):
    """Synthetic traffic of 27 devices of 9 types and of malware phases; nothing was captured.

    100 clients by default. The packets are the same in every run, whatever its seed. The dialogues
    are in `fedbench.datasets.device_dialogues`.
    """

    name = "iot_sample"

    def traffic(self) -> Traffic:
        return normal_traffic(27, 11_950), attack_traffic(8, 1000)
