"""fedbench.datasets.pcap: captures are read back as written, and no input crashes the reader."""

from __future__ import annotations

import gzip
import io
import struct
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from dpkt import icmp, ip, pcap, pcapng, tcp, udp  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbench.datasets.packet_symbols import NO_PORT, symbol_codes, symbol_name
from fedbench.datasets.pcap import Capture, packets_by_device, read_capture
from fedbench.errors import UserError

DEVICE, OTHER_DEVICE, CLOUD = "192.168.1.20", "10.0.0.7", "52.1.2.3"
DEVICE6, CLOUD6 = "fe80::20", "2001:db8::3"
ETHERNET, RAW, COOKED, NULL = 1, 101, 113, 0


class Sent(NamedTuple):
    """A packet to write, and the row expected from the reader."""

    time: float = 0.0
    source: str = DEVICE
    target: str = CLOUD
    protocol: int = 6
    ports: tuple[int, int] = (50000, 443)
    flags: int = 0x18
    size: int = 10  # of the transport payload

    @property
    def has_ports(self) -> bool:
        return self.protocol in (6, 17)

    @property
    def length(self) -> int:
        transport = {6: 20, 17: 8, 1: 4}.get(self.protocol, 0)
        return (20 if "." in self.source else 40) + transport + self.size

    def row(self) -> tuple[Any, ...]:
        """Its row in a capture."""
        ports = self.ports if self.has_ports else (NO_PORT, NO_PORT)
        flags = self.flags if self.protocol == 6 else 0
        ends = self.source, self.target
        return (self.time, *ends, self.protocol, *ports, flags, self.length)

    def packet(self) -> bytes:
        """The IP packet."""
        data: Any = bytes(self.size)
        if self.protocol == 6:
            data = tcp.TCP(sport=self.ports[0], dport=self.ports[1], flags=self.flags, data=data)
        elif self.protocol == 17:
            data = udp.UDP(sport=self.ports[0], dport=self.ports[1], data=data, ulen=8 + self.size)
        elif self.protocol == 1:
            data = icmp.ICMP(type=8, data=data)
        ends = {"src": ip_address(self.source).packed, "dst": ip_address(self.target).packed}
        if "." in self.source:
            return bytes(ip.IP(p=self.protocol, data=data, **ends))
        header = struct.pack(">IHBB", 6 << 28, len(data), self.protocol, 64)
        return header + ends["src"] + ends["dst"] + bytes(data)

    def frame(self, link: int = ETHERNET, tags: int = 0) -> bytes:
        """The frame, with link header and VLAN tags."""
        kind = 0x0800 if "." in self.source else 0x86DD
        tail = b"".join(struct.pack(">HH", 0x8100, 5) for _ in range(tags))
        tail += struct.pack(">H", kind) + self.packet()
        if link == ETHERNET:
            return b"\x02" * 6 + b"\x04" * 6 + tail
        if link == COOKED:
            return struct.pack(">HHH8s", 4, 1, 6, b"\x02" * 6) + tail
        return (struct.pack("<I", 2) if link == NULL else b"") + self.packet()


def written(frames: list[tuple[float, bytes]], link: int = ETHERNET, ng: bool = False) -> bytes:
    file = io.BytesIO()
    if ng:
        idb = (pcapng.InterfaceDescriptionBlockLE)(linktype=link)
        writer: Any = pcapng.Writer(file, idb=idb)
    else:
        writer = pcap.Writer(file, linktype=link)
    for time, frame in frames:
        writer.writepkt(frame, ts=time)
    return file.getvalue()


def rows(capture: Capture) -> list[tuple[Any, ...]]:
    def text(raw: Any) -> str:
        address = IPv6Address(raw.ljust(16, b"\0"))
        return str(address.ipv4_mapped or address)

    return [
        (round(time, 6), text(source), text(target), *numbers)
        for time, source, target, *numbers in capture.packets.tolist()
    ]


@pytest.fixture
def read(tmp_path: Path) -> Callable[[bytes], Capture]:
    def reader(data: bytes) -> Capture:
        path = tmp_path / "made.pcap"
        path.write_bytes(data)
        return read_capture(path)

    return reader


def error_message(path: Path) -> str:
    """Return the message of the UserError: one line that names the file."""
    with pytest.raises(UserError) as caught:
        read_capture(path)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert text.startswith(f"{path}: ")
    return text


DIALOGUE = [
    Sent(1.0, DEVICE, "8.8.8.8", 17, (49999, 53), size=34),
    Sent(1.02, "8.8.8.8", DEVICE, 17, (53, 49999), size=100),
    Sent(1.0204, flags=0x02, size=0),
    Sent(1.05, CLOUD, DEVICE, 6, (443, 50000), 0x12, 0),
    Sent(1.3, DEVICE6, CLOUD6, 6, (50001, 8883), 0x18, 60),
    Sent(1.4, DEVICE, "192.168.1.1", 1, size=56),
    Sent(1.5, DEVICE, "224.0.0.22", 2, size=20),
]


@pytest.mark.parametrize("ng", [False, True], ids=["pcap", "pcapng"])
@pytest.mark.parametrize(
    ("link", "tags"),
    [(ETHERNET, 0), (ETHERNET, 1), (ETHERNET, 2), (RAW, 0), (COOKED, 0), (COOKED, 1), (NULL, 0)],
)
@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gz"])
def test_captures_are_read_back(
    read: Callable[[bytes], Capture], link: int, tags: int, ng: bool, zipped: bool
) -> None:
    data = written([(sent.time, sent.frame(link, tags)) for sent in DIALOGUE], link, ng)
    capture = read(gzip.compress(data) if zipped else data)
    assert rows(capture) == [sent.row() for sent in DIALOGUE]
    assert (capture.n_skipped, capture.truncated) == (0, 0)


def test_packets_by_device_by_hand(read: Callable[[bytes], Capture]) -> None:
    found = packets_by_device(read(written([(sent.time, sent.frame()) for sent in DIALOGUE])))
    assert list(found) == ["fe80::20", DEVICE] or list(found) == [DEVICE, "fe80::20"]
    assert [symbol_name(int(code)) for code in symbol_codes(found[DEVICE])] == [
        "out udp dynamic>system - 40-79 50ms+",
        "in udp dynamic<system - 80-159 <50ms",
        "out tcp dynamic>system SYN 40-79 <1ms",
        "in tcp dynamic<system SYN+ACK 40-79 <50ms",
        "out icmp none>none - 80-159 50ms+",  # the IPv6 packet belongs to another device
        "out ip none>none - 40-79 50ms+",
    ]
    assert [symbol_name(int(code)) for code in symbol_codes(found["fe80::20"])] == [
        "out tcp dynamic>user PSH 80-159 50ms+"
    ]


def test_the_owner_of_a_packet(read: Callable[[bytes], Capture]) -> None:
    listed = [
        Sent(1.0, DEVICE, OTHER_DEVICE),  # belongs to the sender
        Sent(2.0, OTHER_DEVICE, CLOUD),
        Sent(3.0, CLOUD, OTHER_DEVICE),
        Sent(4.0, CLOUD, "8.8.8.8"),  # belongs to no device
        Sent(5.0, CLOUD, "192.168.1.255"),  # likewise: nothing sends from there
    ]
    capture = read(written([(sent.time, sent.frame()) for sent in listed]))
    found = packets_by_device(capture)
    assert {name: p["time"].tolist() for name, p in found.items()} == {
        DEVICE: [1.0],
        OTHER_DEVICE: [2.0, 3.0],
    }
    assert found[OTHER_DEVICE]["outgoing"].tolist() == [True, False]
    assert found[OTHER_DEVICE]["local_port"].tolist() == [50000, 443]
    assert found[OTHER_DEVICE]["remote_port"].tolist() == [443, 50000]
    chosen = packets_by_device(capture, [CLOUD])
    assert {name: p["time"].tolist() for name, p in chosen.items()} == {CLOUD: [2.0, 3.0, 4.0, 5.0]}
    assert chosen[CLOUD]["outgoing"].tolist() == [False, True, True, True]
    assert packets_by_device(capture, ["1.2.3.4"]) == {}


@pytest.mark.parametrize(
    ("address", "private"),
    [
        *[("10.255.0.1", True), ("11.0.0.1", False), ("172.16.0.1", True), ("172.31.9.9", True)],
        *[("172.32.0.1", False), ("192.168.255.1", True), ("192.169.0.1", False)],
        *[("169.254.3.4", True), ("127.0.0.1", False), ("0.0.0.0", False)],
        *[("fe80::1", True), ("fd12::1", True), ("2001:db8::1", False), ("ff02::1", False)],
    ],
)
def test_private_addresses_are_devices(
    read: Callable[[bytes], Capture], address: str, private: bool
) -> None:
    other = CLOUD if "." in address else CLOUD6
    capture = read(written([(1.0, Sent(1.0, address, other).frame())]))
    assert list(packets_by_device(capture)) == ([address] if private else [])


sent_packets = st.builds(
    Sent,
    st.integers(0, 2**31 - 1).map(float),
    st.sampled_from([DEVICE, OTHER_DEVICE, CLOUD]),
    st.sampled_from([DEVICE, CLOUD, "224.0.0.251"]),
    st.sampled_from([1, 2, 6, 17, 47, 50]),
    st.tuples(st.integers(0, 65535), st.integers(0, 65535)),
    st.integers(0, 255),
    st.integers(0, 1400),
)
six = st.builds(
    lambda sent: sent._replace(source=DEVICE6, target=CLOUD6),
    sent_packets.filter(lambda sent: sent.protocol != 50),  # dpkt does not parse ESP
)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(sent_packets | six, min_size=1, max_size=20),
    st.sampled_from([(ETHERNET, 0), (ETHERNET, 1), (ETHERNET, 2), (RAW, 0), (COOKED, 0)]),
    st.booleans(),
)
def test_any_packets_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, listed: list[Sent], link: tuple[int, int], ng: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.pcap"
    path.write_bytes(written([(s.time, s.frame(*link)) for s in listed], link[0], ng))
    assert rows(read_capture(path)) == [sent.row() for sent in listed]


def test_frames_that_are_not_ip_or_damaged_are_counted(read: Callable[[bytes], Capture]) -> None:
    good = Sent(1.0).frame()
    arp = b"\xff" * 6 + b"\x04" * 6 + struct.pack(">H", 0x0806) + bytes(28)
    bad = [
        arp,
        good[:14] + b"\x55" + good[15:],  # version 5
        good[:14] + b"\x44" + good[15:],  # a header of 16 bytes
        good[:14] + b"\x4f" + good[15:],  # a header of 60 bytes in a packet of 50
        good[:30],  # ends in the addresses
        Sent(protocol=2).frame()[:32],
        Sent(source=DEVICE6, target=CLOUD6, protocol=2).frame()[:52],
        good[:36],  # ends in the ports
        good[:46],  # ends before the flags
        good[:16] + struct.pack(">H", 33) + good[18:],  # length field excludes the flags
        b"",
        b"\x01",
    ]
    data = written([(float(i), frame) for i, frame in enumerate([*bad, good])])
    capture = read(data)
    assert capture.n_skipped == len(bad)
    assert [row[0] for row in rows(capture)] == [float(len(bad))]


def test_a_partially_captured_packet_keeps_its_full_length(
    read: Callable[[bytes], Capture],
) -> None:
    sent = Sent(1.0, size=1300)
    (row,) = rows(read(written([(1.0, sent.frame()[:60])])))
    assert row == sent.row()


def test_a_length_of_zero_means_the_length_of_the_frame(read: Callable[[bytes], Capture]) -> None:
    frame = Sent(1.0, size=3000).frame()
    (row,) = rows(read(written([(1.0, frame[:16] + b"\0\0" + frame[18:])])))
    assert row[-1] == 3040


def test_later_fragments_have_no_ports(read: Callable[[bytes], Capture]) -> None:
    frame = bytearray(Sent(1.0, protocol=17, size=100).frame())
    frame[20:22] = struct.pack(">H", 0x2000)  # the first fragment
    first = bytes(frame)
    frame[20:22] = struct.pack(">H", 5)  # 40 bytes into the packet
    found = read(written([(1.0, first), (1.0, bytes(frame))])).packets
    assert found["source_port"].tolist() == [50000, NO_PORT]
    assert found["target_port"].tolist() == [443, NO_PORT]
    assert found["protocol"].tolist() == [17, 17]


def ipv6(payload: bytes, following: int) -> bytes:
    ends = ip_address(DEVICE6).packed + ip_address(CLOUD6).packed
    return struct.pack(">IHBB", 6 << 28, len(payload), following, 64) + ends + payload


def test_extension_headers_of_ipv6(read: Callable[[bytes], Capture]) -> None:
    segment = bytes(udp.UDP(sport=5353, dport=53, data=b"x" * 12, ulen=20))
    hop, routing = bytes([43, 1]) + bytes(14), bytes([60, 0]) + bytes(6)
    options = bytes([44, 0]) + bytes(6)
    first, later = (bytes([17, 0]) + struct.pack(">HI", n << 3 | 1, 9) for n in (0, 7))
    packets = [
        ipv6(hop + routing + options + first + segment, 0),
        ipv6(later + segment, 44),
        ipv6(segment, 17),
        ipv6(bytes([59, 0]) + bytes(6), 60),  # only options
    ]
    found = read(written([(1.0, packet) for packet in packets], RAW)).packets
    assert found["protocol"].tolist() == [17, 17, 17, 59]
    assert found["source_port"].tolist() == [5353, NO_PORT, 5353, NO_PORT]
    assert found["target_port"].tolist() == [53, NO_PORT, 53, NO_PORT]
    assert found["length"].tolist() == [len(packet) for packet in packets]


def test_icmpv6_counts_as_icmp(read: Callable[[bytes], Capture]) -> None:
    capture = read(written([(1.0, ipv6(bytes(24), 58))], RAW))
    (packets,) = packets_by_device(capture).values()
    assert symbol_name(int(symbol_codes(packets)[0])) == "out icmp none>none - 40-79 50ms+"


@pytest.mark.parametrize("zipped", [False, True])
def test_a_truncated_capture_gives_the_packets_before(
    read: Callable[[bytes], Capture], tmp_path: Path, zipped: bool
) -> None:
    frames = [(sent.time, sent.frame()) for sent in DIALOGUE[:3]]
    data = written(frames)
    ends = [24]
    for _, frame in frames:
        ends.append(ends[-1] + 16 + len(frame))
    for length in range(ends[1], len(data) + 1):
        n_whole = sum(end <= length for end in ends) - 1
        part = data[:length]
        capture = read(gzip.compress(part) if zipped else part)
        assert rows(capture) == [sent.row() for sent in DIALOGUE[:n_whole]]
        assert capture.truncated == (length not in ends)


def test_a_truncated_pcapng_gives_the_packets_before(
    read: Callable[[bytes], Capture],
) -> None:
    listed = DIALOGUE[:3]
    ends = [len(written([(s.time, s.frame()) for s in listed[:n]], ng=True)) for n in range(4)]
    data = written([(s.time, s.frame()) for s in listed], ng=True)
    for length in range(ends[1], len(data) + 1):
        capture = read(data[:length])
        n_whole = sum(end <= length for end in ends) - 1
        assert rows(capture) == [sent.row() for sent in listed[:n_whole]]
        assert capture.truncated == (length not in ends)


@pytest.mark.parametrize("ng", [False, True])
def test_a_capture_ends_where_its_file_was_never_written(
    read: Callable[[bytes], Capture], ng: bool
) -> None:
    """Tools that reserve space leave zeros, which are not packets of no bytes."""
    sent = Sent()
    capture = read(written([(0.0, sent.frame())], ng=ng) + bytes(4096))
    assert rows(capture) == [sent.row()]
    assert (capture.n_skipped, capture.truncated) == (0, True)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", "starts with no bytes, expected a pcap or pcapng capture"),
        (b"\x7fELF" + bytes(100), "starts with 7f 45 4c 46, expected a pcap"),
        (b"\xd4\xc3", "starts with d4 c3, expected"),
        (written([])[:20], "starts with d4 c3 b2 a1, expected"),
        (written([]), "none of 0 packets is IP, expected some"),
        (written([], ng=True), "none of 0 packets is IP, expected some"),
        (b"\x0a\x0d\x0d\x0a" + bytes(40), "starts with 0a 0d 0d 0a, expected"),
        (written([(1.0, b"\xff" * 60)] * 3), "none of 3 packets is IP, expected some"),
        (
            written([(1.0, b"\xff" * 60)], 105),
            "link type 105 is not supported, expected Ethernet, Linux cooked, loopback, raw IP",
        ),
        (
            gzip.compress(written([(1.0, Sent().frame())]), mtime=0)[:-9],
            "compressed data is truncated, expected",
        ),
        (gzip.compress(written([]), mtime=0)[:-8] + bytes(8), "cannot be read (CRC check failed"),
        (b"\x1f\x8b\x08" + bytes(range(40)), "cannot be read (Error -3"),
        (gzip.compress(b"", mtime=0), "starts with no bytes, expected"),
    ],
    ids=[
        *("empty", "no capture", "two bytes", "short header", "no packet", "no packet ng"),
        *("no byte order", "no IP", "wireless", "cut gz", "wrong checksum", "no gz", "empty gz"),
    ],
)
def test_other_files_are_errors(tmp_path: Path, data: bytes, error: str) -> None:
    path = tmp_path / "other.pcap"
    path.write_bytes(data)
    assert error in error_message(path)


def test_unreadable_files_are_errors(tmp_path: Path) -> None:
    assert "cannot be read (No such file or directory)" in error_message(tmp_path / "none.pcap")
    assert "cannot be read (Is a directory)" in error_message(tmp_path)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(
    ("magic", "second", "extra"),
    [(0xA1B2C3D4, 10**6, 0), (0xA1B23C4D, 10**9, 0), (0xA1B2CD34, 10**6, 8)],
    ids=["micro", "nano", "modified"],
)
def test_kinds_of_pcap(
    read: Callable[[bytes], Capture], order: str, magic: int, second: int, extra: int
) -> None:
    frame = Sent().frame()
    data = struct.pack(f"{order}IHHIIII", magic, 2, 4, 0, 0, 65535, 1 | 0x14000000)
    for time in (1000.25, 1000.5):
        fraction = int(time % 1 * second)
        data += struct.pack(f"{order}IIII", int(time), fraction, len(frame), len(frame))
        data += bytes(extra) + frame
    assert read(data).packets["time"].tolist() == [1000.25, 1000.5]


def block(order: str, kind: int, body: bytes) -> bytes:
    body += bytes(-len(body) % 4)
    size = struct.pack(f"{order}I", len(body) + 12)
    return struct.pack(f"{order}I", kind) + size + body + size


def section(order: str) -> bytes:
    body = struct.pack(f"{order}IHHq", 0x1A2B3C4D, 1, 0, -1)
    return block(order, 0x0A0D0D0A, body)


def interface(order: str, link: int, resolution: int | None = None, shift: int = 0) -> bytes:
    body = struct.pack(f"{order}HHI", link, 0, 65535)
    if resolution is not None:
        body += struct.pack(f"{order}HHB3x", 9, 1, resolution)
    if shift:
        body += struct.pack(f"{order}HHq", 14, 8, shift)
    return block(order, 1, body + bytes(4))


def enhanced(order: str, number: int, ticks: int, frame: bytes) -> bytes:
    sizes = len(frame), len(frame)
    head = struct.pack(f"{order}IIIII", number, ticks >> 32, ticks & 0xFFFFFFFF, *sizes)
    return block(order, 6, head + frame)


def test_a_pcapng_with_two_sections_and_several_interfaces(
    read: Callable[[bytes], Capture],
) -> None:
    # Each interface has its own link type, resolution and offset. The second section reverses the
    # byte order and defines a new interface 0.
    data = section("<") + interface("<", ETHERNET) + interface("<", RAW, 9)
    data += enhanced("<", 0, 5_000_000, Sent().frame())
    data += enhanced("<", 1, 6_500_000_000, Sent().packet())
    data += block("<", 5, bytes(12))  # statistics
    data += section(">") + interface(">", COOKED, 0x80 | 10, shift=100)
    data += enhanced(">", 0, 512, Sent().frame(COOKED))
    data += block(">", 2, struct.pack(">HHIIII", 0, 0, 0, 1024, 56, 56) + Sent().frame(COOKED)[:56])
    assert read(data).packets["time"].tolist() == [5.0, 6.5, 100.5, 101.0]


def test_unusable_pcapng_packets_are_counted(
    read: Callable[[bytes], Capture],
) -> None:
    frame = Sent().frame()
    data = section("<") + interface("<", ETHERNET) + interface("<", 105)
    data += block("<", 3, struct.pack("<I", len(frame)) + frame)  # a simple packet has no timestamp
    data += enhanced("<", 7, 1, frame)  # no such interface
    data += enhanced("<", 1, 1, frame)  # unsupported link type
    data += block("<", 6, struct.pack("<IIIII", 0, 0, 0, 5000, 5000) + frame)  # exceeds its block
    data += block("<", 6, bytes(8))  # too short for a header
    data += enhanced("<", 0, 1, frame)
    capture = read(data)
    assert (len(capture.packets), capture.n_skipped, capture.truncated) == (1, 5, 0)
    assert read(data + struct.pack("<II", 6, 4) + bytes(40)).truncated == 1  # a block of 4 bytes


def check_capture(path: Path) -> None:
    """Check that the file gives a UserError or a valid capture."""
    try:
        capture = read_capture(path)
    except UserError:
        error_message(path)
        return
    h, n = capture.packets, len(capture.packets)
    assert n > 0
    for port in (h["source_port"], h["target_port"]):
        assert ((port >= NO_PORT) & (port <= 65535)).all()
    assert ((h["protocol"] >= 0) & (h["protocol"] <= 255)).all()
    assert (h["length"] >= 20).all()
    assert np.isfinite(h["time"]).all()
    assert capture.n_skipped >= 0
    total = sum(len(symbol_codes(packets)) for packets in packets_by_device(capture).values())
    assert total <= n


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200), st.sampled_from(["", "pcap", "nano", "ng", "gz"]))
def test_random_bytes_do_not_crash(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, kind: str
) -> None:
    heads = {
        "pcap": written([]),
        "nano": b"\x4d\x3c\xb2\xa1" + written([])[4:],
        "ng": section("<") + interface("<", ETHERNET),
        "gz": b"\x1f\x8b\x08\0\0\0\0\0\0\xff",
    }
    path = tmp_path_factory.getbasetemp() / "random.pcap"
    path.write_bytes(heads.get(kind, b"") + data)
    check_capture(path)


@settings(deadline=None, max_examples=400)
@given(
    st.sampled_from([(ETHERNET, False), (RAW, False), (COOKED, True), (ETHERNET, True)]),
    st.lists(st.tuples(st.integers(0, 900), st.integers(0, 255)), max_size=8),
    st.integers(0, 900),
    st.binary(max_size=20),
)
def test_modified_captures_do_not_crash(
    tmp_path_factory: pytest.TempPathFactory,
    kind: tuple[int, bool],
    changes: list[tuple[int, int]],
    place: int,
    inserted: bytes,
) -> None:
    link, ng = kind
    data = bytearray(written([(s.time, s.frame(link)) for s in DIALOGUE], link, ng))
    for at, value in changes:
        data[at % len(data)] = value
    path = tmp_path_factory.getbasetemp() / "changed.pcap"
    path.write_bytes(data[: place % len(data)] + inserted + data[place % len(data) :])
    check_capture(path)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.binary(max_size=120), min_size=1, max_size=6), st.sampled_from([1, 101, 113, 0]))
def test_frames_of_random_bytes_are_read_or_skipped(
    tmp_path_factory: pytest.TempPathFactory, frames: list[bytes], link: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "frames.pcap"
    path.write_bytes(written([(1.0, Sent().frame(link)), *((2.0, f) for f in frames)], link))
    capture = read_capture(path)
    assert len(capture.packets) + capture.n_skipped == 1 + len(frames)
    assert capture.truncated == 0
    check_capture(path)
