"""Decompression bombs and headers that lie: one line, before the memory is taken."""

from __future__ import annotations

import gzip
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from PIL import Image

from fedbench import memory
from fedbench.data import DATASETS
from fedbench.datasets.files import read_idx
from fedbench.datasets.pcap import read_capture
from fedbench.datasets.reddit_dumps import LineCounts, read_posts
from fedbench.errors import UserError

ZEROS = bytes(2**25)


def refused(source: Path) -> str:
    with pytest.raises(UserError) as caught:
        DATASETS.build({"name": "custom", "source": str(source)}).load()
    return str(caught.value)


def test_an_idx_file_is_read_no_further_than_its_header_says(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(struct.pack(">4I", 0x0803, 2, 3, 3) + ZEROS))
    with pytest.raises(UserError, match="35 bytes or more, expected 34"):
        read_idx(path, 3)
    path.write_bytes(gzip.compress(struct.pack(">4I", 0x0803, 2**20, 2**10, 2**10)))
    with pytest.raises(UserError, match="1048576 x 1024 x 1024 elements, more than the"):
        read_idx(path, 3)


def test_bombs_of_captures_and_dumps(tmp_path: Path) -> None:
    capture, dump = tmp_path / "home.pcap.gz", tmp_path / "posts.zst"
    head = struct.pack("<I2H4I", 0xA1B2C3D4, 2, 4, 0, 0, 65535, 1)
    record = struct.pack("<4I", 0, 0, 2**20, 2**20) + bytes(2**20)
    capture.write_bytes(gzip.compress(head + record * 32, 1))
    with pytest.raises(UserError, match=r"home.pcap.gz: unpacks to more than 200 times its size"):
        read_capture(capture)
    dump.write_bytes(zstandard.compress(ZEROS))
    with pytest.raises(UserError, match=r"posts.zst: unpacks to more than 200 times its size"):
        [*read_posts(dump, LineCounts(), lambda n: None)]


def test_archives_larger_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x_train.npy", ZEROS)
    monkeypatch.setattr(memory, "available", lambda: 2**24)
    assert refused(path).endswith("a.npz: needs about 33.6 MB of memory, 16.8 MB are free")


def test_one_number_that_stands_for_a_trillion(tmp_path: Path) -> None:
    lone = torch.zeros(1, 1, 1).expand(2**20, 2**10, 2**10)
    torch.save({"x_train": lone, "y_train": torch.arange(2)}, tmp_path / "a.pt")
    assert "x_train: needs about 4.4 TB of memory" in refused(tmp_path / "a.pt")


def test_images_are_measured_before_they_are_unpacked(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        Image.new("1", (10_000, 10_000)).save(tmp_path / name / "a.png")
    assert "10000 x 10000 pixels, 67108864 allowed" in refused(tmp_path)


def test_a_picture_that_would_start_a_program_is_refused(tmp_path: Path) -> None:
    """Pillow hands PostScript to Ghostscript, whatever the file is called."""
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / name / "a.png", format="EPS")
    assert "cannot read the image" in refused(tmp_path)
