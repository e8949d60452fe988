"""fedbench.datasets.packet_symbols: symbols by hand and by a slow oracle; the alphabet."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbench.datasets.packet_symbols import (
    N_CODES,
    NO_PORT,
    PACKET,
    Alphabet,
    Packets,
    symbol_codes,
    symbol_name,
)

ROW = tuple[float, bool, int, int, int, int, int]


def table(rows: list[ROW]) -> Packets:
    """Packets from rows of time, outgoing, protocol, local and remote port, flags, length."""
    return np.array(rows, PACKET)


def names(rows: list[ROW]) -> list[str]:
    return [symbol_name(int(code)) for code in symbol_codes(table(rows))]


def test_a_lookup_and_a_connection_by_hand() -> None:
    # A DNS query over UDP from port 50000 is answered after 20 ms. 0.4 ms later the device connects
    # from port 40000 to port 443, sends, and closes. After a second of silence it announces itself
    # (5353 is a user port) and pings.
    rows: list[ROW] = [
        (7.0, True, 17, 50000, 53, 0, 62),
        (7.02, False, 17, 50000, 53, 0, 120),
        (7.0204, True, 6, 40000, 443, 0x02, 60),
        (7.05, False, 6, 40000, 443, 0x12, 60),
        (7.0501, True, 6, 40000, 443, 0x10, 52),
        (7.0502, True, 6, 40000, 443, 0x18, 517),
        (7.09, False, 6, 40000, 443, 0x10, 1500),
        (7.0901, True, 6, 40000, 443, 0x11, 52),
        (7.10, False, 6, 40000, 443, 0x14, 40),
        (8.10, True, 17, 5353, 5353, 0, 200),
        (8.12, True, 1, NO_PORT, NO_PORT, 0, 84),
        (8.14, False, 2, NO_PORT, NO_PORT, 0, 32),
    ]
    assert names(rows) == [
        "out udp dynamic>system - 40-79 50ms+",
        "in udp dynamic<system - 80-159 <50ms",
        "out tcp user>system SYN 40-79 <1ms",
        "in tcp user<system SYN+ACK 40-79 <50ms",
        "out tcp user>system ACK 40-79 <1ms",
        "out tcp user>system PSH 320-639 <1ms",
        "in tcp user<system ACK 1280+ <50ms",
        "out tcp user>system FIN 40-79 <1ms",
        "in tcp user<system RST 40-79 <50ms",
        "out udp user>user - 160-319 50ms+",
        "out icmp none>none - 80-159 <50ms",
        "in ip none<none - 0-39 <50ms",
    ]


@pytest.mark.parametrize(
    ("port", "kind"),
    [
        *[(NO_PORT, "none"), (0, "system"), (1023, "system"), (1024, "user")],
        *[(49151, "user"), (49152, "dynamic"), (65535, "dynamic")],
    ],
)
def test_boundaries_of_port_types(port: int, kind: str) -> None:
    assert names([(0, True, 17, port, 5353, 0, 100)])[0].split()[2] == f"{kind}>user"
    assert names([(0, False, 17, 80, port, 0, 100)])[0].split()[2] == f"system<{kind}"


@pytest.mark.parametrize(
    ("length", "kind"),
    [
        *[(0, "0-39"), (39, "0-39"), (40, "40-79"), (79, "40-79"), (80, "80-159")],
        *[(159, "80-159"), (160, "160-319"), (320, "320-639"), (639, "320-639")],
        *[(640, "640-1279"), (1279, "640-1279"), (1280, "1280+"), (65535, "1280+")],
    ],
)
def test_boundaries_of_length_ranges(length: int, kind: str) -> None:
    assert names([(0, True, 6, 1, 1, 16, length)])[0].split()[4] == kind


@pytest.mark.parametrize(
    ("times", "gaps"),
    [
        ([0, 0.0009, 0.0019, 0.0518, 0.1019], ["50ms+", "<1ms", "<50ms", "<50ms", "50ms+"]),
        ([5, 5, 5], ["50ms+", "<1ms", "<1ms"]),
        ([100, 3, 3.01, 2], ["50ms+", "<1ms", "<50ms", "<1ms"]),
    ],
    ids=["forward", "at once", "backward"],
)
def test_the_time_since_the_previous_packet(times: list[float], gaps: list[str]) -> None:
    rows: list[ROW] = [(time, True, 17, 1, 1, 0, 50) for time in times]
    assert [name.split()[-1] for name in names(rows)] == gaps


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        *[(0x02, "SYN"), (0x12, "SYN+ACK"), (0x10, "ACK"), (0x18, "PSH"), (0x11, "FIN")],
        *[(0x19, "FIN"), (0x04, "RST"), (0x14, "RST"), (0x00, "odd"), (0x03, "odd")],
        *[(0x29, "odd"), (0x06, "odd"), (0x01, "odd"), (0x08, "odd"), (0xC2, "SYN")],
        *[(0x52, "SYN+ACK"), (0x30, "ACK"), (0xD0, "ACK")],  # with ECN and URG bits
    ],
)
def test_kinds_of_tcp_flags(flags: int, kind: str) -> None:
    assert names([(0, True, 6, 1, 1, flags, 50)])[0].split()[3] == kind
    assert names([(0, True, 17, 1, 1, flags, 50)])[0].split()[3] == "-"


def slow_name(row: ROW, before: float | None) -> str:
    """The symbol of one packet, straight from the documentation."""
    time, outgoing, protocol, local, remote, flags, length = row
    gap = 1.0 if before is None else max(time - before, 0.0)
    words = ["out" if outgoing else "in"]
    words.append({6: "tcp", 17: "udp", 1: "icmp", 58: "icmp"}.get(protocol, "ip"))
    kinds = []
    for port in (local, remote):
        if port < 0:
            kinds.append("none")
        else:
            kinds.append("system" if port < 1024 else "user" if port < 49152 else "dynamic")
    words.append((">" if outgoing else "<").join(kinds))
    has = {bit: bool(flags >> i & 1) for i, bit in enumerate("FSRPA")}
    if protocol != 6:
        words.append("-")
    elif has["S"]:
        plain = not has["F"] and not has["R"]
        words.append(("SYN+ACK" if has["A"] else "SYN") if plain else "odd")
    elif has["R"]:
        words.append("RST")
    elif not has["A"]:
        words.append("odd")
    else:
        words.append("FIN" if has["F"] else "PSH" if has["P"] else "ACK")
    low = next((low for low in (1280, 640, 320, 160, 80, 40) if length >= low), 0)
    words.append("1280+" if low == 1280 else f"{low}-{2 * low - 1 if low else 39}")
    words.append("<1ms" if gap < 0.001 else "<50ms" if gap < 0.05 else "50ms+")
    return " ".join(words)


ports = st.one_of(st.just(NO_PORT), st.integers(0, 65535))
packets = st.tuples(
    st.floats(-1e3, 1e3, allow_nan=False) | st.sampled_from([0.0, 0.0005, 0.01, 0.5]),
    st.booleans(),
    st.sampled_from([1, 2, 6, 6, 17, 58]) | st.integers(0, 255),
    ports,
    ports,
    st.integers(0, 255),
    st.integers(0, 65575),
)


@settings(deadline=None)
@given(st.lists(packets, max_size=30))
def test_symbols_match_the_slow_oracle(rows: list[ROW]) -> None:
    times: list[float | None] = [None, *(row[0] for row in rows)]
    want = [slow_name(row, before) for row, before in zip(rows, times[:-1], strict=True)]
    assert names(rows) == want


def test_every_code_has_a_unique_name() -> None:
    assert len({symbol_name(code) for code in range(N_CODES)}) == N_CODES


def test_the_alphabet_by_hand() -> None:
    # 7 occurs four times, 9 and 3 twice, 5 once. Size 4 keeps 7, then 3 before 9 (a tie, by code);
    # 5 and all others get id 0.
    streams = [np.array([7, 7, 9, 5], np.int32), np.array([3, 7, 9, 3, 7], np.int32)]
    alphabet = Alphabet.from_streams(streams, 4)
    assert alphabet.kept == (7, 3, 9)
    assert alphabet.encode(np.array([7, 3, 9, 5, 100])).tolist() == [1, 2, 3, 0, 0]
    assert alphabet.vocabulary == {
        "other": 0,
        symbol_name(7): 1,
        symbol_name(3): 2,
        symbol_name(9): 3,
    }


def test_a_large_alphabet_holds_only_the_symbols_present() -> None:
    alphabet = Alphabet.from_streams([np.array([5, 5, 2], np.int32)], 100)
    assert alphabet.kept == (5, 2)
    assert set(alphabet.vocabulary.values()) == {0, 1, 2}
    assert Alphabet.from_streams([], 10).vocabulary == {"other": 0}


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), max_size=60), st.integers(2, 25))
def test_an_alphabet_keeps_the_most_frequent(stream: list[int], size: int) -> None:
    array = np.array(stream, np.int32)
    alphabet = Alphabet.from_streams([array], size)
    ids = alphabet.encode(array)
    assert ids.max(initial=0) < size
    counts = np.bincount(array, minlength=21)
    kept = list(alphabet.kept)
    assert len(kept) == min(size - 1, len(set(stream)))
    left = [counts[code] for code in set(stream) - set(kept)]
    assert not kept or not left or min(counts[kept]) >= max(left)
    for code, i in zip(stream, ids.tolist(), strict=True):
        assert (kept[i - 1] == code) if i else code not in kept
