"""Captures: the packets in a pcap or pcapng file, by the device that sends or receives them.

Only IP counts: other frames (ARP, ...) and frames that cannot be decoded are skipped and counted,
as is a record that the end of the file cuts off. Frames are decoded by dpkt; the records of a file
are gone through here, since dpkt's readers take a record that is cut off for a whole one, and know
one interface of a pcapng only: the times and links of others would be read wrong.
"""

from __future__ import annotations

import gzip
import mmap
import struct
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import Any

import numpy as np
from dpkt import ethernet, ip, ip6, pcap, pcapng  # type: ignore[import-untyped]
from numpy.typing import NDArray

from fedbench.datasets.packet_symbols import NO_PORT, TCP, UDP, Floats, Ints, Packets
from fedbench.errors import UserError

EXPECTED = "expected a capture as pcap or pcapng, plain or gzipped"
# Addresses of hosts at home: private (RFC 1918, RFC 4193) and of the link alone
PRIVATE = [
    ip_network(network)
    for network in (
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"),
        *("fc00::/7", "fe80::/10"),
    )
]
MAPPED = b"\0" * 10 + b"\xff" * 2  # before an IPv4 address written as one of IPv6
Buffer = bytes | mmap.mmap


def _raw(frame: bytes) -> Any:
    return (ip6.IP6 if frame[0] >> 4 == 6 else ip.IP)(frame)


def _cooked(frame: bytes) -> Any:
    # Its header ends as Ethernet's does; dpkt's own class knows no VLAN tags.
    return ethernet.Ethernet(frame[2:]).data


# https://www.tcpdump.org/linktypes.html
LINK_TYPES: dict[int, tuple[str, Callable[[bytes], Any]]] = {
    1: ("Ethernet", lambda frame: ethernet.Ethernet(frame).data),
    113: ("Linux cooked", _cooked),
    # Its address family has another number on each system: the version of IP tells.
    **dict.fromkeys((0, 108), ("loopback", lambda frame: _raw(frame[4:]))),
    **dict.fromkeys((12, 14, 101, 228, 229), ("raw IP", _raw)),
}


@dataclass(frozen=True, eq=False)
class Capture:
    """The n packets of IP in a file, in the order they stand in, and what else there is."""

    time: Floats  # [n] seconds
    source: NDArray[np.bytes_]  # [n] addresses, of IPv4 as one of IPv6
    target: NDArray[np.bytes_]  # [n]
    protocol: Ints  # [n]
    source_port: Ints  # [n]
    target_port: Ints  # [n]
    flags: Ints  # [n] of TCP
    length: Ints  # [n] bytes, from the IP header on
    n_skipped: int  # frames that are not IP, or damaged
    n_cut: int  # 1 if the file ends within a record, or goes on as none

    def __str__(self) -> str:
        cut = "; it ends within a record" if self.n_cut else ""
        skipped = f"skipped as not IP or damaged: {self.n_skipped:,}"
        return f"{len(self.time):,} packets; {skipped}{cut}"


@dataclass
class _Frames:
    """Where the frames of a file lie, as the file's records are gone through."""

    found: list[tuple[float, int, int, int]] = field(default_factory=list)  # time, start, end, link
    n_skipped: int = 0
    n_cut: int = 0


def read_capture(path: Path) -> Capture:
    """All packets of IP in a file; a UserError if there are none."""
    data = _contents(path)
    frames = _frames(path, data)
    links = {link for *_, link in frames.found}
    if links and not links & LINK_TYPES.keys():
        known = ", ".join(dict.fromkeys(name for name, _ in LINK_TYPES.values()))
        raise UserError(f"{path}: packets of link type {min(links)}, expected {known}")
    decoded = ((time, decode(data[start:end], link)) for time, start, end, link in frames.found)
    rows = [(time, *header) for time, header in decoded if header is not None]
    n_all = len(frames.found) + frames.n_skipped
    if not rows:
        raise UserError(f"{path}: no packet of IP among {n_all}, expected some")
    time, source, target, *numbers = zip(*rows, strict=True)
    protocol, source_port, target_port, flags, length = (np.array(n, np.int32) for n in numbers)
    return Capture(
        time=np.array(time),
        source=np.array(source, "S16"),
        target=np.array(target, "S16"),
        protocol=protocol,
        source_port=source_port,
        target_port=target_port,
        flags=flags,
        length=length,
        n_skipped=n_all - len(rows),
        n_cut=frames.n_cut,
    )


def decode(frame: bytes, link: int) -> tuple[bytes, bytes, int, int, int, int, int] | None:
    """Source, target, protocol, ports, flags and length; None if it is not IP, or damaged."""
    try:
        packet = LINK_TYPES[link][1](frame)
        if isinstance(packet, ip.IP) and packet.v == 4:
            later, header = packet.offset > 0, 4 * packet.hl
            length = packet.len or len(packet)  # 0 where the network card does segmentation
        elif isinstance(packet, ip6.IP6):
            later = any(getattr(more, "frag_off", 0) for more in packet.all_extension_headers)
            header, length = 40, packet.plen + 40 if packet.plen else len(packet)
        else:
            return None
        ports, flags, inside = (NO_PORT, NO_PORT), 0, packet.data
        if packet.p in (TCP, UDP) and not later:  # later fragments have none
            ports, flags = (inside.sport, inside.dport), getattr(inside, "flags", 0)
        ends = ((MAPPED + end)[-16:] for end in (packet.src, packet.dst))
        return (*ends, packet.p, *ports, flags, length) if header <= length else None
    except Exception:  # dpkt has many kinds for damaged bytes
        return None


def by_device(capture: Capture, chosen: Collection[str] | None = None) -> dict[str, Packets]:
    """The packets of each device, in order, by the device's address.

    Devices are the `chosen` addresses; None: every host that sends from a private one. A packet
    belongs to the device that sent it, else to the one it is sent to, so a packet between two
    devices is the sender's alone; one between two other hosts is nobody's.
    """
    source, target = capture.source, capture.target
    hosts = np.unique(source)
    wanted = None if chosen is None else {ip_address(text) for text in chosen}
    devices = hosts[[_is_device(host, wanted) for host in hosts]]
    sent = np.isin(source, devices)
    own = sent | np.isin(target, devices)
    names, whose = np.unique(np.where(sent, source, target)[own], return_inverse=True)
    table = Packets(
        time=capture.time,
        outgoing=sent,
        protocol=capture.protocol,
        local_port=np.where(sent, capture.source_port, capture.target_port),
        remote_port=np.where(sent, capture.target_port, capture.source_port),
        flags=capture.flags,
        length=capture.length,
    )
    order = np.flatnonzero(own)[np.argsort(whose, kind="stable")]
    ends = np.cumsum(np.bincount(whose, minlength=len(names)))
    parts = np.split(order, ends)[:-1]
    return {_text(name): table.at(part) for name, part in zip(names, parts, strict=True)}


def _address(raw: bytes) -> IPv6Address:
    return IPv6Address(raw.ljust(16, b"\0"))  # numpy drops zeros at the end


def _text(raw: bytes) -> str:
    """As people write it: 192.168.1.2, fe80::1."""
    address = _address(raw)
    return str(address.ipv4_mapped or address)


def _is_device(raw: bytes, wanted: Collection[object] | None) -> bool:
    address = _address(raw)
    plain = address.ipv4_mapped or address
    if wanted is not None:
        return plain in wanted
    return any(plain in network for network in PRIVATE)


def _contents(path: Path) -> Buffer:
    """The bytes of a file, unpacked if they are gzipped, whatever its name is."""
    try:
        with path.open("rb") as file:
            if file.read(2) != b"\x1f\x8b":
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return gzip.decompress(path.read_bytes())
    except EOFError as error:
        raise UserError(f"{path}: gzip data cut off, {EXPECTED}") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: damaged gzip data ({error}), {EXPECTED}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}), {EXPECTED}") from error
    except ValueError as error:  # of mmap
        raise UserError(f"{path}: empty file, {EXPECTED}") from error


def _frames(path: Path, data: Buffer) -> _Frames:
    """Where the frames of a file lie."""
    magic = data[:4]
    frames = _Frames()
    for order in "<>":
        (number,) = struct.unpack(f"{order}I", magic.ljust(4, b"\0"))
        if number in PCAP and len(data) >= 24:
            _read_pcap(data, order, *PCAP[number], frames)
            break
        if number == pcapng.PCAPNG_BT_SHB and data[8:12] in BYTE_ORDERS:
            _read_pcapng(data, frames)
            break
    else:
        raise UserError(f"{path}: begins with the bytes {magic.hex(' ') or 'none'}, {EXPECTED}")
    if not len(frames.found) + frames.n_skipped:
        raise UserError(f"{path}: a capture without a packet, expected some")
    return frames


# Magic number -> parts of a second that times are in, bytes of a record's header
PCAP = {
    pcap.TCPDUMP_MAGIC: (1e6, 16),
    pcap.TCPDUMP_MAGIC_NANO: (1e9, 16),
    pcap.MODPCAP_MAGIC: (1e6, 24),
}


def _read_pcap(data: Buffer, order: str, second: float, header: int, frames: _Frames) -> None:
    record = struct.Struct(f"{order}III")
    link = struct.unpack_from(f"{order}I", data, 20)[0] & 0xFFFF  # above it: the checksum's length
    place, end = 24, len(data)
    while place + header <= end:
        seconds, rest, size = record.unpack_from(data, place)
        start, stop = place + header, place + header + size
        if stop > end:
            break
        frames.found.append((seconds + rest / second, start, stop, link))
        place = stop
    frames.n_cut = int(place < end)


BYTE_ORDERS = {b"\x4d\x3c\x2b\x1a": "<", b"\x1a\x2b\x3c\x4d": ">"}
PACKET_BLOCKS = {pcapng.PCAPNG_BT_EPB: "I", pcapng.PCAPNG_BT_PB: "Hxx"}  # the interface's number
SIMPLE_PACKET_BLOCK = 3  # which has no time
Interface = tuple[int, float, int]  # link type, parts of a second, seconds to add


def _read_pcapng(data: Buffer, frames: _Frames) -> None:
    place, end, order = 0, len(data), "<"
    interfaces: list[Interface | None] = []
    while place < end:
        if data[place : place + 4] == b"\x0a\x0d\x0d\x0a":  # a section, with its own byte order
            order, interfaces = BYTE_ORDERS.get(data[place + 8 : place + 12], order), []
        kind, size = struct.unpack(f"{order}II", data[place : place + 8].ljust(8, b"\0"))
        if size < 12 or size % 4 or place + size > end:
            frames.n_cut = 1  # nothing after it can be told apart
            return
        if kind == pcapng.PCAPNG_BT_IDB:
            interfaces.append(_interface(data[place : place + size], order))
        elif kind in PACKET_BLOCKS and size >= 32:
            layout = f"{order}{PACKET_BLOCKS[kind]}III"
            number, high, low, captured = struct.unpack_from(layout, data, place + 8)
            found = interfaces[number] if number < len(interfaces) else None
            if found is None or captured > size - 32:
                frames.n_skipped += 1
            else:
                link, second, shift = found
                time, start = (high << 32 | low) / second + shift, place + 28
                frames.found.append((time, start, start + captured, link))
        elif kind in (*PACKET_BLOCKS, SIMPLE_PACKET_BLOCK):
            frames.n_skipped += 1
        place += size


def _interface(block: bytes, order: str) -> Interface | None:
    """What an interface description says; None if it is damaged."""
    kinds = {"<": pcapng.InterfaceDescriptionBlockLE, ">": pcapng.InterfaceDescriptionBlock}
    try:
        read = kinds[order](block)
        second, shift = 1e6, 0
        for option in read.opts:
            if option.code == pcapng.PCAPNG_OPT_IF_TSRESOL:
                power = option.data[0]
                second = float((2 if power & 0x80 else 10) ** (power & 0x7F))
            elif option.code == pcapng.PCAPNG_OPT_IF_TSOFFSET:
                shift = struct.unpack(f"{order}q", option.data)[0]
        return read.linktype, second, shift
    except Exception:  # dpkt has many kinds for damaged bytes
        return None
