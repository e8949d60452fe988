"""Mutated data files: each is read as a data set, or refused in one line, in bounded memory."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import zstandard
from dpkt import ethernet, ip, tcp
from numpy.typing import NDArray
from PIL import Image

from fedbench.datasets import custom_readers
from fedbench.datasets.custom import CustomData
from fedbench.datasets.files import read_arrays, read_cifar, read_idx, read_table
from fedbench.datasets.packet_symbols import symbol_codes
from fedbench.datasets.pcap import packets_by_device, read_capture
from fedbench.datasets.reddit import Reddit
from tests.soak._refusals import judged
from tests.soak.outcome import Outcome

TIMES = 10_000
BOMB = 2**27  # bytes of a bomb, unpacked
EXTREMES = (0, 1, 2**16, 2**24, 2**27, 2**31 - 1, 2**31, 2**32 - 1)
PICTURES = {"png": "PNG", "jpg": "JPEG", "bmp": "BMP", "gif": "GIF"}
PICTURES |= {"tif": "TIFF", "webp": "WEBP", "pgm": "PPM"}
PACK: Mapping[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": partial(gzip.compress, compresslevel=1),
    ".bz2": bz2.compress,
    ".xz": partial(lzma.compress, preset=0),
    ".zst": zstandard.ZstdCompressor().compress,
}


@dataclass(frozen=True)
class Kind:
    """Files of one format: their name, an intact one, what reads them, how they are packed."""

    name: str
    content: bytes
    read: Callable[[Path], object]
    packed: tuple[str, ...] = ("",)


def kinds() -> list[Kind]:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (12, 8, 8), dtype=np.uint8)
    labels = np.arange(12) % 3
    arrays = {"x_train": pixels, "y_train": labels}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    idx = struct.pack(">4I", 0x0803, *pixels.shape) + pixels.tobytes()
    record = bytes([3]) + bytes(3072)
    gz = ("", ".gz")
    return [
        Kind("images-idx3-ubyte", idx, lambda path: read_idx(path, 3), gz),
        Kind("data_batch_1.bin", record * 3, read_cifar, gz),
        Kind("home.pcap", pcap(), _read_packets, gz),
        Kind("home.pcapng", pcapng(), _read_packets, gz),
        Kind("posts.jsonl", posts(), _read_posts, tuple(PACK)),
        Kind("arrays.npz", _saved(partial(np.savez, **arrays)), _read_own),
        Kind("packed.npz", _saved(partial(np.savez_compressed, **arrays)), _read_own),
        Kind("named.npz", _saved(partial(np.savez, **arrays)), _read_named),
        Kind("tensors.pt", _saved(partial(torch.save, tensors)), _read_own),
        Kind("table.csv", b"1,2.5,3\n4 5 6\n" * 5, lambda path: read_table(path, 3)),
        *(_picture(pixels[0], suffix, name) for suffix, name in PICTURES.items()),
    ]


def _picture(pixels: NDArray[np.uint8], suffix: str, name: str) -> Kind:
    return Kind(
        f"a.{suffix}", _saved(partial(Image.fromarray(pixels).save, format=name)), _read_image
    )


def frames() -> list[bytes]:
    """Ten packets between a device and a server."""
    made = []
    for i in range(10):
        segment = tcp.TCP(sport=40_000 + i, dport=443, flags=tcp.TH_ACK, data=b"x" * i)
        addresses = {"src": b"\xc0\xa8\0\x02", "dst": b"\x08\x08\x08\x08"}
        packet = ip.IP(**addresses, p=ip.IP_PROTO_TCP, data=segment)
        packet.len = len(packet)
        made.append(bytes(ethernet.Ethernet(data=packet)))
    return made


def pcap() -> bytes:
    records = (struct.pack("<4I", i, 0, len(f), len(f)) + f for i, f in enumerate(frames()))
    return struct.pack("<I2H4I", 0xA1B2C3D4, 2, 4, 0, 0, 65535, 1) + b"".join(records)


def pcapng() -> bytes:
    def block(kind: int, body: bytes) -> bytes:
        body += bytes(-len(body) % 4)
        size = 12 + len(body)
        return struct.pack("<2I", kind, size) + body + struct.pack("<I", size)

    head = block(0x0A0D0D0A, struct.pack("<I2Hq", 0x1A2B3C4D, 1, 0, -1))
    interface = block(1, struct.pack("<2HI", 1, 0, 65535))
    packets = (
        block(6, struct.pack("<5I", 0, 0, i, len(f), len(f)) + f) for i, f in enumerate(frames())
    )
    return head + interface + b"".join(packets)


def posts() -> bytes:
    lines = ({"author": f"a{i % 2}", "body": f"some words of post {i}"} for i in range(40))
    return "\n".join(map(json.dumps, lines)).encode()


def _saved(save: Callable[[Any], object]) -> bytes:
    file = BytesIO()
    save(file)
    return file.getvalue()


def _read_packets(path: Path) -> None:
    for packets in packets_by_device(read_capture(path)).values():
        symbol_codes(packets)


def _read_posts(path: Path) -> None:
    Reddit(words=50, length=4, min_posts=2, max_posts=100, path=str(path)).read([path])


def _read_own(path: Path) -> None:
    CustomData(source=str(path)).load()


def _read_named(path: Path) -> None:
    read_arrays(path, {"x_train": (None, 8, 8), "y_train": (None,)})


def _read_image(path: Path) -> None:
    CustomData(source=str(path.parent.parent)).load()


def mutated(content: bytes, others: bytes, rng: random.Random) -> bytes:
    """The content after one to three mutations."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(data) + 1)
        near = rng.choice((at, rng.randrange(min(len(data), 64) + 1)))  # headers
        size = rng.choice((1, 2, 4, 8, 64))
        match rng.randrange(8):
            case 0 if data:
                data[near % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                del data[at:]
            case 2:
                order = rng.choice(("<I", ">I"))
                data[near : near + 4] = struct.pack(order, rng.choice(EXTREMES))
            case 3:
                data[near : near + size] = rng.randbytes(size)
            case 4:
                data = data[at:] + data[:at]
            case 5:
                data += others if rng.random() < 0.5 else content
            case 6:
                del data[near : near + size]
            case _:
                data[near:near] = data[at : at + size] * rng.randrange(1, 50)
    return bytes(data)


def bombs() -> list[tuple[Kind, bytes, str]]:
    """Small files that unpack to 128 MB, or claim to hold more than any memory."""
    by_name = {kind.name: kind for kind in kinds()}
    found = []
    for name, start in (
        ("images-idx3-ubyte", struct.pack(">4I", 0x0803, 2**20, 2**10, 2**10)),
        ("images-idx3-ubyte", struct.pack(">4I", 0x0803, 1, 2**13, 2**14)),
        ("data_batch_1.bin", b""),
        ("home.pcap", pcap()),
        ("home.pcapng", pcapng()),
        ("posts.jsonl", posts()),
    ):
        kind = by_name[name]
        for packed in kind.packed[1:]:
            found.append((kind, PACK[packed](start + bytes(BOMB)), packed))
    lone = torch.zeros(1, 1, 1).expand(2**20, 2**10, 2**10)
    tensors = {"x_train": lone, "y_train": torch.arange(2)}
    found.append((by_name["tensors.pt"], _saved(partial(torch.save, tensors)), ""))
    picture = _saved(partial(Image.new("1", (20_000, 20_000)).save, format="PNG"))
    found.append((by_name["a.png"], picture, ""))
    return found


def soak(times: int, seed: int) -> Iterator[Outcome]:
    all_kinds = kinds()
    exploding: list[tuple[Kind, bytes, str]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedbench-soak-")))
        uncached = mock.patch.object(custom_readers, "cached", lambda name, key, build: build())
        stack.enter_context(uncached)
        for i in range(times):
            rng = random.Random(f"{seed} {i}")
            kind, other = rng.choice(all_kinds), rng.choice(all_kinds)
            packed, content = rng.choice(kind.packed), kind.content
            if rng.random() < 0.003:
                exploding = exploding or bombs()
                kind, content, packed = rng.choice(exploding)
            elif rng.random() < 0.5:
                content = PACK[packed](mutated(content, other.content, rng))
            else:
                content = mutated(PACK[packed](content), other.content, rng)
            yield outcome(kind, content, packed, folder, f"try {i} of seed {seed}")


def outcome(kind: Kind, content: bytes, packed: str, folder: Path, about: str) -> Outcome:
    """Write a file, for an image into a folder with an intact one, and read it."""
    is_image = kind.name.startswith("a.")
    path = folder / "photos" / "one" / kind.name if is_image else folder / (kind.name + packed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    if is_image:
        intact = folder / "photos" / "two" / kind.name
        intact.parent.mkdir(exist_ok=True)
        intact.write_bytes(kind.content)
        (path.parent / f"b{path.suffix}").write_bytes(kind.content)
        (intact.parent / f"b{path.suffix}").write_bytes(kind.content)
    try:
        return judged(lambda: kind.read(path), "read", f"{about}, {path.name}")
    finally:
        for file in folder.rglob("*.*" if is_image else path.name):
            if file.is_file():
                file.unlink()
