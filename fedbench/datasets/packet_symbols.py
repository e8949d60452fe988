"""Packets of a device as symbols: after Nguyen et al., DIoT, ICDCS 2019.

https://arxiv.org/abs/1804.07474

A symbol is what seven features of a packet say together: its direction, its protocol, the types of
the device's port and of the other host's, the flags of TCP, its length, and the time since the
packet before it. Differs from the paper: lengths fall in fixed ranges and not in those of a
device's most frequent lengths, flags in the kinds that TCP has, so that a symbol means the same in
every data set; the time is told apart at 1 ms (one burst) and 50 ms (one dialogue).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int32]

NO_PORT = -1  # of a packet without one: another protocol, a later fragment
ICMP, TCP, UDP, ICMP6 = 1, 6, 17, 58  # protocols of IP, by number
FIN, SYN, RST, PSH, ACK = 1, 2, 4, 8, 16

DIRECTIONS = ("in", "out")
PROTOCOLS = ("tcp", "udp", "icmp", "ip")  # ip: any other
PORTS = ("none", "system", "user", "dynamic")  # below 1024, below 49152, the rest
FLAGS = ("-", "SYN", "SYN+ACK", "ACK", "PSH", "FIN", "RST", "odd")  # -: not TCP
LENGTHS = ("0-39", "40-79", "80-159", "160-319", "320-639", "640-1279", "1280+")  # bytes, of IP
GAPS = ("<1ms", "<50ms", "50ms+")  # since the device's packet before; its first is 50ms+

FEATURES = (DIRECTIONS, PROTOCOLS, PORTS, PORTS, FLAGS, LENGTHS, GAPS)
SHAPE = tuple(len(values) for values in FEATURES)
N_CODES = int(np.prod(SHAPE))

OTHER = "other"  # the symbol of all that the alphabet leaves out


class Table:
    """Columns of one length: a dataclass whose fields are arrays [n, ...]."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """The rows of all, one after the other."""
        names = cls.__dataclass_fields__
        return cls(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in names})

    def at(self, rows: NDArray[Any]) -> Self:
        """Some of the rows, by number or by a mask."""
        return type(self)(**{name: getattr(self, name)[rows] for name in self.__dataclass_fields__})


@dataclass(frozen=True, eq=False)
class Packets(Table):
    """Packets that a device sends and receives, in the order they were seen in."""

    time: Floats  # [n] seconds
    outgoing: Bools  # [n] whether the device sent it
    protocol: Ints  # [n] of IP, by number
    local_port: Ints  # [n] the device's; NO_PORT: none
    remote_port: Ints  # [n]
    flags: Ints  # [n] of TCP; of others anything
    length: Ints  # [n] bytes, from the IP header on


def codes(packets: Packets) -> Ints:
    """The symbol of each packet [n], 0 <= code < N_CODES."""
    features = (
        packets.outgoing.astype(np.int32),
        _protocol(packets.protocol),
        _port_type(packets.local_port),
        _port_type(packets.remote_port),
        _flags(packets.flags, packets.protocol),
        np.searchsorted([40, 80, 160, 320, 640, 1280], packets.length, side="right"),
        _gap(packets.time),
    )
    return np.ravel_multi_index(features, SHAPE).astype(np.int32)


def name_of(code: int) -> str:
    """`out tcp dynamic>system SYN 40-79 <1ms`: the device's port is on the left."""
    places = np.unravel_index(code, SHAPE)
    words = [values[int(i)] for values, i in zip(FEATURES, places, strict=True)]
    direction, protocol, local, remote, *rest = words
    arrow = ">" if direction == "out" else "<"
    return " ".join([direction, protocol, f"{local}{arrow}{remote}", *rest])


def _protocol(numbers: Ints) -> Ints:
    classes = [numbers == TCP, numbers == UDP, (numbers == ICMP) | (numbers == ICMP6)]
    return np.select(classes, [0, 1, 2], default=3).astype(np.int32)


def _port_type(ports: Ints) -> Ints:
    return np.searchsorted([0, 1024, 49152], ports, side="right").astype(np.int32)


def _flags(flags: Ints, protocol: Ints) -> Ints:
    """The first kind that fits, by what matters most in a connection's life."""
    fin, syn, rst, psh, ack = ((flags & bit) > 0 for bit in (FIN, SYN, RST, PSH, ACK))
    kinds = [
        (protocol != TCP, "-"),
        (syn & (fin | rst), "odd"),
        (rst, "RST"),
        (syn & ack, "SYN+ACK"),
        (syn, "SYN"),
        (fin & ack, "FIN"),
        (ack & psh, "PSH"),
        (ack, "ACK"),
    ]
    numbers = [FLAGS.index(name) for _, name in kinds]
    odd = FLAGS.index("odd")
    return np.select([mask for mask, _ in kinds], numbers, default=odd).astype(np.int32)


def _gap(time: Floats) -> Ints:
    """A clock that is set back makes no time pass: a gap below 0 is in the first range too."""
    gaps = np.diff(time, prepend=-np.inf)  # [n]
    return np.searchsorted([0.001, 0.05], gaps, side="right").astype(np.int32)


@dataclass(frozen=True)
class Alphabet:
    """The symbols that a network tells apart, by number; all others are number 0."""

    kept: tuple[int, ...]  # codes; number 1 is the first
    size: int  # what fits, at least 1 + len(kept)

    @classmethod
    def of(cls, streams: Sequence[Ints], size: int) -> Alphabet:
        """The most frequent symbols of all streams of codes, the most frequent first."""
        counts = sum((np.bincount(s, minlength=N_CODES) for s in streams), np.zeros(N_CODES, int))
        frequent = np.argsort(-counts, kind="stable")[: size - 1]
        return cls(tuple(int(code) for code in frequent if counts[code]), size)

    def numbers(self, stream: Ints) -> Ints:
        """Codes [n] as numbers [n], 0 <= number < size."""
        table = np.zeros(N_CODES, np.int32)
        table[list(self.kept)] = np.arange(1, len(self.kept) + 1)
        return table[stream]

    @property
    def vocabulary(self) -> dict[str, int]:
        """Name -> number, of the symbols there are."""
        return {OTHER: 0, **{name_of(code): i for i, code in enumerate(self.kept, start=1)}}
