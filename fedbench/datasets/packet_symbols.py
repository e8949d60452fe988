"""Packets as symbols, after DIoT (Nguyen et al., ICDCS 2019).

https://arxiv.org/abs/1804.07474

A symbol combines seven features of a packet: direction, protocol, the types of the device's port
and of the remote port, TCP flags, length, and the time since the previous packet. Differs from the
paper: lengths use fixed ranges instead of a device's most frequent lengths, and flags use the kinds
of TCP segments, so that a symbol means the same in every data set; times are split at 1 ms (one
burst) and 50 ms (one dialogue).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Ints = NDArray[np.int32]
Packets = NDArray[np.void]  # [n] of PACKET, in the order of capture

NO_PORT = -1  # the packet has none: another protocol, or a later fragment
ICMP, TCP, UDP, ICMP6 = 1, 6, 17, 58  # IP protocol numbers
FIN, SYN, RST, PSH, ACK = 1, 2, 4, 8, 16

DIRECTIONS = ("in", "out")
PROTOCOLS = ("tcp", "udp", "icmp", "ip")  # ip: any other
PORTS = ("none", "system", "user", "dynamic")  # below 1024, below 49152, above
FLAGS = ("-", "SYN", "SYN+ACK", "ACK", "PSH", "FIN", "RST", "odd")  # -: not TCP
LENGTHS = ("0-39", "40-79", "80-159", "160-319", "320-639", "640-1279", "1280+")  # bytes of IP
GAPS = ("<1ms", "<50ms", "50ms+")  # since the device's previous packet; its first is 50ms+

FEATURES = (DIRECTIONS, PROTOCOLS, PORTS, PORTS, FLAGS, LENGTHS, GAPS)
SHAPE = tuple(len(values) for values in FEATURES)
N_CODES = int(np.prod(SHAPE))

OTHER = "other"  # any symbol outside the alphabet


# A packet that one device sends or receives
PACKET = np.dtype(
    [
        ("time", "f8"),  # seconds
        ("outgoing", "?"),  # sent by the device
        ("protocol", "i4"),  # IP protocol number
        ("local_port", "i4"),  # the device's; NO_PORT: none
        ("remote_port", "i4"),
        ("flags", "i4"),  # of TCP; undefined for other protocols
        ("length", "i4"),  # bytes, including the IP header
    ]
)


def symbol_codes(packets: Packets) -> Ints:
    """Return the symbol code of each packet [n], 0 <= code < N_CODES."""
    protocol = packets["protocol"]
    protocols = [protocol == TCP, protocol == UDP, np.isin(protocol, (ICMP, ICMP6))]
    gaps = np.diff(packets["time"], prepend=-np.inf)  # negative if the clock was set back
    features = (
        packets["outgoing"].astype(np.int32),
        np.select(protocols, [0, 1, 2], default=3),
        np.digitize(packets["local_port"], [0, 1024, 49152]),
        np.digitize(packets["remote_port"], [0, 1024, 49152]),
        _flags(packets["flags"], protocol),
        np.digitize(packets["length"], [40, 80, 160, 320, 640, 1280]),
        np.digitize(gaps, [0.001, 0.05]),
    )
    return np.ravel_multi_index(features, SHAPE).astype(np.int32)


def symbol_name(code: int) -> str:
    """Return e.g. `out tcp dynamic>system SYN 40-79 <1ms`; the device's port is on the left."""
    indices = np.unravel_index(code, SHAPE)
    names = [values[int(i)] for values, i in zip(FEATURES, indices, strict=True)]
    direction, protocol, local, remote, *rest = names
    arrow = ">" if direction == "out" else "<"
    return " ".join([direction, protocol, f"{local}{arrow}{remote}", *rest])


def _flags(flags: Ints, protocol: Ints) -> NDArray[np.intp]:
    """Classify TCP flags; the first matching kind wins."""
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
    return np.select([mask for mask, _ in kinds], numbers, default=FLAGS.index("odd"))


@dataclass(frozen=True)
class Alphabet:
    """Symbols that the network distinguishes, by id; all others have id 0."""

    kept: tuple[int, ...]  # codes, starting at id 1

    @classmethod
    def from_streams(cls, streams: Sequence[Ints], size: int) -> Alphabet:
        """Keep the `size` - 1 most frequent codes of all streams, the most frequent first."""
        counts = sum((np.bincount(s, minlength=N_CODES) for s in streams), np.zeros(N_CODES, int))
        frequent = np.argsort(-counts, kind="stable")[: size - 1]
        return cls(tuple(int(code) for code in frequent if counts[code]))

    def encode(self, stream: Ints) -> Ints:
        """Map codes [n] to ids [n]."""
        table = np.zeros(N_CODES, np.int32)
        table[list(self.kept)] = np.arange(1, len(self.kept) + 1)
        return table[stream]

    @property
    def vocabulary(self) -> dict[str, int]:
        """Symbol name -> id."""
        return {OTHER: 0, **{symbol_name(code): i for i, code in enumerate(self.kept, start=1)}}
