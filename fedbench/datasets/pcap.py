"""Capture reader: the packets of a pcap or pcapng file, by device.

Only IP counts: other frames (ARP, ...) and frames that cannot be decoded are skipped and counted.
dpkt decodes the frames. This module walks the file records itself, because dpkt's readers accept a
truncated last record, and support only one pcapng interface: they would misread the times and link
types of the others.
"""

from __future__ import annotations

import gzip
import mmap
import struct
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import Any

import numpy as np
from dpkt import ethernet, ip, ip6, pcap, pcapng  # type: ignore[import-untyped]
from numpy.typing import NDArray

from fedbench.datasets.files import reading
from fedbench.datasets.packet_symbols import NO_PORT, TCP, UDP, Floats, Ints, Packets
from fedbench.errors import UserError

EXPECTED = "a pcap or pcapng capture, plain or gzipped"
# Private (RFC 1918, RFC 4193) and link-local addresses
HOME = "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 169.254.0.0/16 fc00::/7 fe80::/10"
HOME_NETWORKS = [ip_network(network) for network in HOME.split()]
MAPPED = b"\0" * 10 + b"\xff" * 2  # prefix of an IPv4-mapped IPv6 address
Buffer = bytes | mmap.mmap


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


@dataclass(frozen=True, eq=False)
class Capture:
    """The n IP packets of a file, in file order."""

    time: Floats  # [n] seconds
    source: NDArray[np.bytes_]  # [n] IPv6 addresses; IPv4 ones are mapped
    target: NDArray[np.bytes_]  # [n]
    protocol: Ints  # [n]
    source_port: Ints  # [n]
    target_port: Ints  # [n]
    flags: Ints  # [n] of TCP
    length: Ints  # [n] bytes, including the IP header
    _: KW_ONLY
    n_skipped: int  # frames that are not IP, or damaged
    truncated: bool  # the last record is incomplete or invalid

    def __str__(self) -> str:
        truncated = "; the file is truncated" if self.truncated else ""
        return (
            f"{len(self.time):,} packets; skipped {self.n_skipped:,} non-IP or damaged{truncated}"
        )


@dataclass
class _FrameIndex:
    """Position of each frame in a file."""

    found: list[tuple[float, int, int, int]] = field(default_factory=list)  # time, start, end, link
    n_skipped: int = 0
    truncated: bool = False


def read_capture(path: Path) -> Capture:
    """Read all IP packets of a file. Raise a UserError if there are none."""
    data = _read(path)
    frames = _index_frames(path, data)
    links = {link for *_, link in frames.found}
    if links and not links & LINK_TYPES.keys():
        known = ", ".join(dict.fromkeys(name for name, _ in LINK_TYPES.values()))
        raise UserError(f"{path}: link type {min(links)} is not supported, expected {known}")
    decoded = (
        (time, decode_frame(data[start:end], link)) for time, start, end, link in frames.found
    )
    rows = [(time, *header) for time, header in decoded if header is not None]
    n_all = len(frames.found) + frames.n_skipped
    if not rows:
        raise UserError(f"{path}: none of {n_all} packets is IP, expected some")
    time, source, target, *numbers = zip(*rows, strict=True)
    return Capture(
        np.array(time),
        np.array(source, "S16"),
        np.array(target, "S16"),
        *(np.array(column, np.int32) for column in numbers),
        n_skipped=n_all - len(rows),
        truncated=frames.truncated,
    )


def decode_frame(frame: bytes, link: int) -> tuple[bytes, bytes, int, int, int, int, int] | None:
    """Return source, target, protocol, ports, flags and length; None if not IP, or damaged."""
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
    source, target = capture.source, capture.target
    hosts = np.unique(source)
    wanted = None if chosen is None else {ip_address(text) for text in chosen}
    devices = hosts[[_is_device(host, wanted) for host in hosts]]
    sent = np.isin(source, devices)
    owned = sent | np.isin(target, devices)
    names, owner = np.unique(np.where(sent, source, target)[owned], return_inverse=True)
    packets = Packets(
        time=capture.time,
        outgoing=sent,
        protocol=capture.protocol,
        local_port=np.where(sent, capture.source_port, capture.target_port),
        remote_port=np.where(sent, capture.target_port, capture.source_port),
        flags=capture.flags,
        length=capture.length,
    )
    order = np.flatnonzero(owned)[np.argsort(owner, kind="stable")]
    ends = np.cumsum(np.bincount(owner, minlength=len(names)))
    parts = np.split(order, ends)[:-1]
    return {str(_address(name)): packets.select(p) for name, p in zip(names, parts, strict=True)}


def _address(raw: bytes) -> IPv4Address | IPv6Address:
    address = IPv6Address(raw.ljust(16, b"\0"))  # numpy drops trailing zeros
    return address.ipv4_mapped or address


def _is_device(raw: bytes, wanted: Collection[object] | None) -> bool:
    address = _address(raw)
    if wanted is not None:
        return address in wanted
    return any(address in network for network in HOME_NETWORKS)


def _read(path: Path) -> Buffer:
    """Return the bytes of a file, decompressed if they are gzipped, whatever its name."""
    with reading(path, EXPECTED):
        with path.open("rb") as file:
            if not (magic := file.read(2)):
                raise UserError(f"{path}: empty file, expected {EXPECTED}")
            if magic != b"\x1f\x8b":
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return gzip.decompress(path.read_bytes())


def _index_frames(path: Path, data: Buffer) -> _FrameIndex:
    magic = data[:4]
    frames = _FrameIndex()
    for order in "<>":
        (number,) = struct.unpack(f"{order}I", magic.ljust(4, b"\0"))
        if number in PCAP and len(data) >= 24:
            _index_pcap(data, order, *PCAP[number], frames)
            break
        if number == pcapng.PCAPNG_BT_SHB and data[8:12] in BYTE_ORDERS:
            _index_pcapng(data, frames)
            break
    else:
        found = magic.hex(" ") or "no bytes"
        raise UserError(f"{path}: starts with {found}, expected {EXPECTED}")
    if not len(frames.found) + frames.n_skipped:
        raise UserError(f"{path}: no packets, expected some")
    return frames


# Magic number -> ticks per second, bytes of a record header
PCAP = {
    pcap.TCPDUMP_MAGIC: (1e6, 16),
    pcap.TCPDUMP_MAGIC_NANO: (1e9, 16),
    pcap.MODPCAP_MAGIC: (1e6, 24),
}


def _index_pcap(data: Buffer, order: str, ticks: float, header: int, frames: _FrameIndex) -> None:
    record = struct.Struct(f"{order}III")
    link = struct.unpack_from(f"{order}I", data, 20)[0] & 0xFFFF  # upper bits: checksum length
    position, end = 24, len(data)
    while position + header <= end:
        seconds, fraction, size = record.unpack_from(data, position)
        start, stop = position + header, position + header + size
        if stop > end:
            break
        frames.found.append((seconds + fraction / ticks, start, stop, link))
        position = stop
    frames.truncated = position < end


BYTE_ORDERS = {b"\x4d\x3c\x2b\x1a": "<", b"\x1a\x2b\x3c\x4d": ">"}
PACKET_BLOCKS = {
    pcapng.PCAPNG_BT_EPB: "I",
    pcapng.PCAPNG_BT_PB: "Hxx",
}  # format of the interface id
SIMPLE_PACKET_BLOCK = 3  # has no timestamp
Interface = tuple[int, float, int]  # link type, ticks per second, offset in seconds


def _index_pcapng(data: Buffer, frames: _FrameIndex) -> None:
    position, end, order = 0, len(data), "<"
    interfaces: list[Interface | None] = []
    while position < end:
        if data[position : position + 4] == b"\x0a\x0d\x0d\x0a":  # new section, own byte order
            order = BYTE_ORDERS.get(data[position + 8 : position + 12], order)
            interfaces = []
        kind, size = struct.unpack(f"{order}II", data[position : position + 8].ljust(8, b"\0"))
        if size < 12 or size % 4 or position + size > end:
            frames.truncated = True  # the next block cannot be found
            return
        if kind == pcapng.PCAPNG_BT_IDB:
            interfaces.append(_interface(data[position : position + size], order))
        elif kind in PACKET_BLOCKS and size >= 32:
            layout = f"{order}{PACKET_BLOCKS[kind]}III"
            number, high, low, n_captured = struct.unpack_from(layout, data, position + 8)
            interface = interfaces[number] if number < len(interfaces) else None
            if interface is None or n_captured > size - 32:
                frames.n_skipped += 1
            else:
                link, ticks, offset = interface
                time, start = (high << 32 | low) / ticks + offset, position + 28
                frames.found.append((time, start, start + n_captured, link))
        elif kind in (*PACKET_BLOCKS, SIMPLE_PACKET_BLOCK):
            frames.n_skipped += 1
        position += size


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
