"""Capture reader: the packets of a pcap or pcapng file, by device.

Only IP counts: other frames (ARP, ...) and frames that cannot be decoded are skipped and counted.
dpkt decodes the frames. This module walks the file records itself, because dpkt's readers accept a
truncated last record, and support only one pcapng interface: they would misread the times and link
types of the others.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import Any

import numpy as np
from dpkt import ethernet, ip, ip6, pcap, pcapng  # type: ignore[import-untyped]
from numpy.typing import NDArray

from fedbench.datasets.files import decompressed
from fedbench.datasets.packet_symbols import NO_PORT, PACKET, TCP, UDP, Packets
from fedbench.errors import UserError

EXPECTED = "a pcap or pcapng capture, plain or gzipped"
# Private (RFC 1918, RFC 4193) and link-local addresses
HOME = "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 169.254.0.0/16 fc00::/7 fe80::/10"
HOME_NETWORKS = [ip_network(network) for network in HOME.split()]
MAPPED = b"\0" * 10 + b"\xff" * 2  # prefix of an IPv4-mapped IPv6 address
SHORTEST = 20  # bytes of the header of IP
CHUNK = 2**16  # packets to pack at a time, and bytes to skip
LARGEST_RECORD = 2**27  # bytes; a larger record is damaged


def _decode_raw(frame: bytes) -> Any:
    return (ip6.IP6 if frame[0] >> 4 == 6 else ip.IP)(frame)


def _decode_cooked(frame: bytes) -> Any:
    # The header ends like Ethernet's; dpkt's own class does not support VLAN tags.
    return ethernet.Ethernet(frame[2:]).data


# https://www.tcpdump.org/linktypes.html
LINK_TYPES: dict[int, tuple[str, Callable[[bytes], Any]]] = {
    1: ("Ethernet", lambda frame: ethernet.Ethernet(frame).data),
    113: ("Linux cooked", _decode_cooked),
    # Address family numbers differ between systems, so skip the field and use the IP version.
    **dict.fromkeys((0, 108), ("loopback", lambda frame: _decode_raw(frame[4:]))),
    **dict.fromkeys((12, 14, 101, 228, 229), ("raw IP", _decode_raw)),
}
UNKNOWN_LINK = -1
Frame = tuple[float, int, bytes]  # time in seconds, link type, content
UNUSABLE: Frame = (0.0, UNKNOWN_LINK, b"")

HEADER = np.dtype(
    [
        ("time", "f8"),  # seconds
        ("source", "S16"),  # IPv6 address; IPv4 ones are mapped
        ("target", "S16"),
        ("protocol", "i4"),
        ("source_port", "i4"),
        ("target_port", "i4"),
        ("flags", "i4"),  # of TCP
        ("length", "i4"),  # bytes, including the IP header
    ]
)


@dataclass(frozen=True, eq=False)
class Capture:
    """The n IP packets of a file."""

    packets: NDArray[np.void]  # [n] of HEADER, in file order
    n_skipped: int  # frames that are not IP, or damaged
    truncated: bool  # the last record is incomplete or invalid

    def __str__(self) -> str:
        truncated = "; the file is truncated" if self.truncated else ""
        skipped = f"skipped {self.n_skipped:,} non-IP or damaged{truncated}"
        return f"{len(self.packets):,} packets; {skipped}"


class TruncatedError(Exception):
    """A record is incomplete or invalid, so the next one cannot be found."""


def read_capture(path: Path) -> Capture:
    """Read all IP packets of a file. Raise a UserError if there are none."""
    rows, links, n_frames, truncated = PackedRows(), set(), 0, False
    with decompressed(path, EXPECTED) as file:
        try:
            for time, link, frame in _frames(path, file):
                n_frames += 1
                links.add(link)
                if (header := decode_frame(frame, link)) is not None:
                    rows.append((time, *header))
        except TruncatedError:
            truncated = True
            for _ in iter(partial(file.read, CHUNK), b""):  # an error if a gzipped file is damaged
                pass
    links.discard(UNKNOWN_LINK)
    if links and not links & LINK_TYPES.keys():
        known = ", ".join(dict.fromkeys(name for name, _ in LINK_TYPES.values()))
        raise UserError(f"{path}: link type {min(links)} is not supported, expected {known}")
    packets = rows.packed()
    if not len(packets):
        raise UserError(f"{path}: none of {n_frames} packets is IP, expected some")
    return Capture(packets, n_frames - len(packets), truncated)


class PackedRows:
    """Rows of HEADER. Packed, they take less memory than in the file."""

    def __init__(self) -> None:
        self._rows: list[tuple[Any, ...]] = []
        self._parts: list[NDArray[np.void]] = []

    def append(self, row: tuple[Any, ...]) -> None:
        self._rows.append(row)
        if len(self._rows) == CHUNK:
            self._pack()

    def packed(self) -> NDArray[np.void]:
        """Return all rows [n]."""
        self._pack()
        return np.concatenate(self._parts)

    def _pack(self) -> None:
        self._parts.append(np.array(self._rows, HEADER))
        self._rows.clear()


def decode_frame(frame: bytes, link: int) -> tuple[bytes, bytes, int, int, int, int, int] | None:
    """Return source, target, protocol, ports, flags and length; None if not IP, or damaged."""
    if len(frame) < SHORTEST:  # saves the time of an exception
        return None
    try:
        packet = LINK_TYPES[link][1](frame)
        if isinstance(packet, ip.IP) and packet.v == 4:
            is_later_fragment, header = packet.offset > 0, 4 * packet.hl
            length = packet.len or len(packet)  # 0 if the network card segments packets
        elif isinstance(packet, ip6.IP6):
            extensions = packet.all_extension_headers
            is_later_fragment = any(getattr(header, "frag_off", 0) for header in extensions)
            header, length = 40, packet.plen + 40 if packet.plen else len(packet)
        else:
            return None
        ports, flags, segment = (NO_PORT, NO_PORT), 0, packet.data
        if packet.p in (TCP, UDP) and not is_later_fragment:  # only first fragments have ports
            ports, flags = (segment.sport, segment.dport), getattr(segment, "flags", 0)
        addresses = ((MAPPED + address)[-16:] for address in (packet.src, packet.dst))
        return (*addresses, packet.p, *ports, flags, length) if header <= length else None
    except Exception:  # dpkt raises many types for damaged bytes
        return None


def packets_by_device(
    capture: Capture, chosen: Collection[str] | None = None
) -> dict[str, Packets]:
    """Return the packets of each device, in order, by the device's address.

    Devices are the `chosen` addresses; None: every private address that sends packets. A packet
    belongs to the sending device, otherwise to the receiving one: a packet between two devices
    belongs to the sender only, and a packet between two other hosts to none.
    """
    rows, source, target = capture.packets, capture.packets["source"], capture.packets["target"]
    hosts = np.unique(source)
    wanted = None if chosen is None else {ip_address(text) for text in chosen}
    devices = hosts[[_is_device(host, wanted) for host in hosts]]
    sent = np.isin(source, devices)
    packets = np.empty(len(rows), PACKET)
    for name in ("time", "protocol", "flags", "length"):
        packets[name] = rows[name]
    packets["outgoing"] = sent
    packets["local_port"] = np.where(sent, rows["source_port"], rows["target_port"])
    packets["remote_port"] = np.where(sent, rows["target_port"], rows["source_port"])
    owned = sent | np.isin(target, devices)
    names, owner = np.unique(np.where(sent, source, target)[owned], return_inverse=True)
    order = np.argsort(owner, kind="stable")  # one pass, however many devices there are
    ends = np.cumsum(np.bincount(owner, minlength=len(names)))
    parts = np.split(packets[owned][order], ends)[:-1]
    return {str(_address(name)): part for name, part in zip(names, parts, strict=True)}


def _address(raw: bytes) -> IPv4Address | IPv6Address:
    address = IPv6Address(raw.ljust(16, b"\0"))  # numpy drops trailing zeros
    return address.ipv4_mapped or address


def _is_device(raw: bytes, wanted: Collection[object] | None) -> bool:
    address = _address(raw)
    if wanted is not None:
        return address in wanted
    return any(address in network for network in HOME_NETWORKS)


def _frames(path: Path, file: BufferedReader) -> Iterator[Frame]:
    """Return all frames of a file. The iterator raises TruncatedError at a damaged record."""
    head = file.read(24)
    for order in "<>":
        (magic,) = struct.unpack(f"{order}I", head[:4].ljust(4, b"\0"))
        if magic in PCAP and len(head) == 24:
            link = struct.unpack_from(f"{order}I", head, 20)[0] & 0xFFFF  # above: checksum length
            return _pcap_frames(file, order, link, *PCAP[magic])
        if magic == pcapng.PCAPNG_BT_SHB and head[8:12] in BYTE_ORDERS:
            file.seek(0)
            return _pcapng_frames(file)
    raise UserError(f"{path}: starts with {head[:4].hex(' ') or 'no bytes'}, expected {EXPECTED}")


def _read(file: BufferedReader, size: int) -> bytes:
    """Read exactly `size` bytes."""
    data = file.read(size) if size <= LARGEST_RECORD else b""
    if len(data) < size:
        raise TruncatedError
    return data


# Magic number -> ticks per second, bytes of a record header
PCAP = {
    pcap.TCPDUMP_MAGIC: (1e6, 16),
    pcap.TCPDUMP_MAGIC_NANO: (1e9, 16),
    pcap.MODPCAP_MAGIC: (1e6, 24),
}


def _pcap_frames(
    file: BufferedReader, order: str, link: int, ticks: float, header: int
) -> Iterator[Frame]:
    while file.peek(1):
        seconds, fraction, size = struct.unpack_from(f"{order}III", head := _read(file, header))
        if not any(head):  # space that was reserved and never written; also a bomb of zeros
            raise TruncatedError
        yield seconds + fraction / ticks, link, _read(file, size)


SECTION = pcapng.PCAPNG_BT_SHB.to_bytes(4)  # the same in both byte orders
BYTE_ORDERS = {b"\x4d\x3c\x2b\x1a": "<", b"\x1a\x2b\x3c\x4d": ">"}
PACKET_BLOCKS = {pcapng.PCAPNG_BT_EPB: "I", pcapng.PCAPNG_BT_PB: "Hxx"}  # format of interface ids
Interface = tuple[int, float, int]  # link type, ticks per second, offset in seconds


def _pcapng_frames(file: BufferedReader) -> Iterator[Frame]:
    order = "<"
    interfaces: list[Interface | None] = []
    while file.peek(1):
        head = _read(file, 12)
        if head.startswith(SECTION):  # has its own byte order and interfaces
            order, interfaces = BYTE_ORDERS.get(head[8:], order), []
        kind, size = struct.unpack_from(f"{order}II", head)
        if size < 12 or size % 4:
            raise TruncatedError
        block = head + _read(file, size - 12)
        if kind == pcapng.PCAPNG_BT_IDB:
            interfaces.append(_interface(block, order))
        elif kind in PACKET_BLOCKS and size >= 32:
            layout = f"{order}{PACKET_BLOCKS[kind]}III"
            number, high, low, n_captured = struct.unpack_from(layout, block, 8)
            interface = interfaces[number] if number < len(interfaces) else None
            if interface is None or n_captured > size - 32:
                yield UNUSABLE
            else:
                link, ticks, offset = interface
                yield (high << 32 | low) / ticks + offset, link, block[28 : 28 + n_captured]
        elif kind in (*PACKET_BLOCKS, pcapng.PCAPNG_BT_SPB):  # simple packets have no timestamp
            yield UNUSABLE


def _interface(block: bytes, order: str) -> Interface | None:
    """Parse an interface description block; None if it is damaged."""
    classes = {"<": pcapng.InterfaceDescriptionBlockLE, ">": pcapng.InterfaceDescriptionBlock}
    try:
        description = classes[order](block)
        ticks, offset = 1e6, 0
        for option in description.opts:
            if option.code == pcapng.PCAPNG_OPT_IF_TSRESOL:
                power = option.data[0]
                ticks = float((2 if power & 0x80 else 10) ** (power & 0x7F))
            elif option.code == pcapng.PCAPNG_OPT_IF_TSOFFSET:
                offset = struct.unpack(f"{order}q", option.data)[0]
        return description.linktype, ticks, offset
    except Exception:  # dpkt raises many types for damaged bytes
        return None
