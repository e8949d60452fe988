"""fedbench.datasets.iot: clients, test windows and attacks from captures and synthetic packets."""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import numpy as np
import pooch  # type: ignore[import-untyped]
import pytest
import torch
from dpkt import pcap  # type: ignore[import-untyped]

from fedbench.data import DATASETS, Kind, Sequences, Spec
from fedbench.datasets import iot
from fedbench.datasets.device_dialogues import ATTACK_PHASES, DEVICE_TYPES
from fedbench.datasets.iot import Iot, IotSample, Traffic, TrafficSource, phase_of
from fedbench.datasets.packet_symbols import PACKET, TCP, UDP, Packets, symbol_codes
from fedbench.datasets.pcap import packets_by_device, read_capture
from fedbench.datasets.synthetic_traffic import attack_traffic, normal_traffic
from fedbench.errors import UserError

CLOUD = "52.1.2.3"


def write_pcap(path: Path, streams: Mapping[str, Packets]) -> Path:
    """Write a capture with the packets of each device (by address) in time order."""
    frames = []
    for device, packets in streams.items():
        ends = ip_address(device).packed, ip_address(CLOUD).packed
        for i, time in enumerate(packets["time"].tolist()):
            frames.append((time, frame_of(packets, i, ends)))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        writer = pcap.Writer(file, nano=True)
        for time, frame in sorted(frames, key=lambda pair: pair[0]):
            writer.writepkt(frame, ts=time)
    return path


def frame_of(packets: Packets, i: int, ends: tuple[bytes, bytes]) -> bytes:
    """Ethernet, IPv4 and transport headers without payload."""
    source, target = ends if packets["outgoing"][i] else ends[::-1]
    ports = [int(packets["local_port"][i]), int(packets["remote_port"][i])]
    protocol, length = int(packets["protocol"][i]), int(packets["length"][i])
    head = struct.pack(">BBHHHBBH", 0x45, 0, length, 0, 0, 64, protocol, 0) + source + target
    ordered = ports if packets["outgoing"][i] else ports[::-1]
    if protocol == TCP:
        head += struct.pack(">HHIIBBHHH", *ordered, 0, 0, 0x50, int(packets["flags"][i]), 0, 0, 0)
    elif protocol == UDP:
        head += struct.pack(">HHHH", *ordered, length - 20, 0)
    return bytes(12) + struct.pack(">H", 0x0800) + head


def steady(n: int, port: int = 443, start: float = 0.0) -> Packets:
    """n packets, alternately out and in, 10 ms apart."""
    ones = np.ones(n, np.int32)
    outgoing = np.arange(n) % 2 == 0
    time = start + 0.01 * np.arange(n, dtype=np.float64)
    columns = time, outgoing, TCP * ones, 50000 * ones, port * ones, 16 * ones, 52 * ones
    return np.rec.fromarrays(columns, dtype=PACKET)


class Made(TrafficSource):
    """Uses given packets."""

    name = "made"
    given: Traffic

    def traffic(self) -> Traffic:
        return self.given


def made(
    devices: Sequence[Packets],
    attacks: Mapping[str, Sequence[Packets]] | None = None,
    **fields: Any,
) -> Sequences:
    normal = {str(i): packets for i, packets in enumerate(devices)}
    kind = type("MadeNow", (Made,), {"given": (normal, attacks or {})})
    return kind(**fields).load()  # type: ignore[no-any-return]


def packets_of(numbers: list[int]) -> Packets:
    """One kind of packet per distinct number, distinguished by length and port."""
    n = len(numbers)
    array, ones = np.array(numbers, np.int32), np.ones(n, np.int32)
    lengths = np.array([30, 50, 100, 200, 400], np.int32)[array % 5]
    ports = np.array([80, 8080, 50000], np.int32)[array // 5]
    columns = np.arange(n), ones, UDP * ones, ports, 53 * ones, 0 * ones, lengths
    return np.rec.fromarrays(columns, dtype=PACKET)


def test_windows_by_hand() -> None:
    # Ten packets; the last two (0.2) are for testing and give one window of length 1. The other
    # eight belong to one client: seven windows of two. Kind 9 occurs twice and gets id 1; the rest
    # occur once and are ordered by code. Both packets of kind 9 have the same symbol, because a
    # second passes before each.
    numbers = [9, 0, 1, 2, 3, 4, 5, 6, 9, 7]
    data = made([packets_of(numbers)], length=1, symbols_min=8, symbols_max=8, symbols=30)
    stream = symbol_codes(packets_of(numbers)).tolist()
    order = sorted(set(stream), key=lambda code: (-stream.count(code), code))
    ids = [1 + order.index(code) for code in stream]
    assert data.x_train.tolist() == [[i] for i in ids[:7]]
    assert data.y_train.tolist() == [[i] for i in ids[1:8]]
    assert data.x_test.tolist() == [[ids[8]]] == [[1]]
    assert data.y_test.tolist() == [[ids[9]]]
    assert data.owners is not None
    assert data.owners.tolist() == [0] * 7
    assert data.n_classes == 30
    assert set(data.vocabulary.values()) == set(range(10))


def test_windows_overlap_by_one_and_an_incomplete_one_is_dropped() -> None:
    # 45 packets, 36 for training: windows of 6 with stride 5 start at 0, 5, ... 30, and the last
    # ends with packet 35. The first 6 of the 9 test packets form a window.
    settings: dict[str, Any] = {"length": 5, "symbols_min": 36, "symbols_max": 36, "symbols": 50}
    data = made([packets_of([*range(15)] * 3)], **settings)
    assert data.x_train.shape == (7, 5)
    assert torch.equal(data.x_train[1:, 0], data.y_train[:-1, -1])
    assert torch.equal(data.x_train[:, 1:], data.y_train[:, :-1])
    assert data.x_test.shape == (1, 5)
    assert data.x_train.dtype == data.y_train.dtype == torch.int32


def test_no_client_holds_packets_of_two_devices_and_sizes_are_in_range() -> None:
    devices = [steady(n, port) for n, port in ((1000, 443), (777, 8883), (90, 53), (130, 50000))]
    data = made(devices, length=1, symbols_min=100, symbols_max=150)
    assert data.owners is not None
    counts: Counter[str] = Counter()
    for owner in range(int(data.owners.max()) + 1):
        held = data.x_train[data.owners == owner]
        assert 100 <= len(held) + 1 <= 150
        (ports,) = {name.split()[2].replace("<", ">") for name in names(data, held)}
        counts[ports] += 1
    # 800, 622, 72 and 104 training packets give 6 to 8, 4 to 6, 0 and 1 clients.
    assert 6 <= counts["dynamic>system"] <= 8
    assert 4 <= counts["dynamic>user"] <= 6
    assert counts["dynamic>dynamic"] == 1
    tested = {name.split()[2] for name in names(data, data.x_test)}
    assert tested == {"dynamic>system", "dynamic<system", "dynamic>user", "dynamic<user"} | {
        "dynamic>dynamic",
        "dynamic<dynamic",
    }
    assert len(data.x_test) == 200 - 1 + 155 - 1 + 26 - 1  # none of the device without a client


def names(data: Sequences, numbers: Any) -> set[str]:
    by_number = {number: name for name, number in data.vocabulary.items()}
    return {by_number[int(number)] for number in numbers.unique()}


def test_a_client_can_be_a_device() -> None:
    devices = [steady(1000), steady(500), steady(60)]
    data = made(devices, client="device", length=1, symbols_min=100, symbols_max=150)
    assert data.owners is not None
    assert data.owners.bincount().tolist() == [800 - 1, 400 - 1]


def test_chunks_vary_in_size_and_are_the_same_in_every_run() -> None:
    runs = [made([steady(5000)] * 3, length=1, symbols_min=100, symbols_max=200) for _ in range(2)]
    assert runs[0].owners is not None
    assert runs[1].owners is not None
    assert torch.equal(runs[0].owners, runs[1].owners)
    assert len(set(runs[0].owners.bincount().tolist())) > 20


def test_attacks_have_separate_training_and_test_windows() -> None:
    # Two infected devices with 50 and 30 packets: 40 and 24 for poisoning, 10 and 6 for testing.
    # Windows of 4: 13 and 7, 3 and 1.
    attack = [packets_of([1, 2, 3, 4, 5] * 10), packets_of([6, 7] * 15)]
    data = made([steady(200)], {"scan": attack}, length=3, symbols_min=100)
    train, test = data.attacks["scan"]
    assert train.shape == (13 + 7, 4)
    assert test.shape == (3 + 1, 4)
    assert train.dtype == torch.int32
    assert data.threshold == 0.01


def test_the_alphabet_covers_attacks_and_drops_rare_symbols() -> None:
    attack = {"scan": [packets_of([1, 2] * 20)]}
    data = made([steady(200)], attack, length=3, symbols_min=100, symbols=4)
    # 100 normal packets of each of two kinds (the very first is a third kind), then two kinds in
    # the attack, 20 each: one of these is kept, the other gets id 0.
    train, _ = data.attacks["scan"]
    assert set(train.unique().tolist()) == {0, 3}
    assert len(data.vocabulary) == 4
    assert data.n_classes == 4


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"client": "home"}, "client must be one of chunk, device, got home"),
        ({"length": 0}, "length must be at least 1, got 0"),
        ({"symbols_min": 3001}, "symbols_min must be above length=20 and at most symbols_max=3000"),
        ({"symbols_min": 20}, "symbols_min must be above length=20"),
        ({"symbols": 1}, "symbols must be at least 2, got 1"),
        ({"threshold": 0.0}, "threshold must be above 0 and below 1, got 0.0"),
        ({"threshold": 1.0}, "threshold must be above 0 and below 1, got 1.0"),
        ({"test_rate": 1.0}, "test_rate must be above 0 and below 1, got 1.0"),
        ({"test_rate": float("nan")}, "test_rate must be above 0 and below 1, got nan"),
    ],
)
@pytest.mark.parametrize("name", ["iot", "iot_sample"])
def test_settings_out_of_range_are_errors(name: str, fields: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError, match=f"dataset {name}: {error}"):
        DATASETS.build({"name": name, **fields})


def test_an_invalid_address_is_an_error() -> None:
    with pytest.raises(UserError, match=r"'192\.168\.1' does not appear to be an IPv4 or IPv6"):
        DATASETS.build({"name": "iot", "devices": ["192.168.1"]})


def test_too_few_packets_are_an_error() -> None:
    error = r"made: 2 devices with at most 150 packets give no client .* symbols_min=130, length=20"
    with pytest.raises(UserError, match=error):
        made([steady(100), steady(150)], symbols_min=130)
    with pytest.raises(UserError, match="give no client or no test window"):
        made([steady(150)], symbols_min=100, test_rate=0.1)  # 15 test packets
    with pytest.raises(UserError, match="made: 0 devices with at most 0 packets"):
        made([])
    with pytest.raises(UserError, match="attack scan has 40 device packets, too few for"):
        made([steady(200)], {"scan": [steady(40)]}, symbols_min=100)
    with pytest.raises(UserError, match="attack scan has 0 device packets, too few for"):
        made([steady(200)], {"scan": []}, symbols_min=100)


@pytest.mark.parametrize("name", ["iot", "iot_sample"])
def test_the_spec_is_known_before_loading(name: str) -> None:
    source = DATASETS.build({"name": name, "length": 33, "symbols": 77})
    assert source.spec == Spec(name, (33,), 77, Kind.SEQUENCES, natural=True)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder and cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDBENCH_DATA", raising=False)
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / "cache" / project)
    return tmp_path


def small(folder: Path, **fields: Any) -> Iot:
    return Iot(path=str(folder), length=4, symbols_min=20, symbols_max=30, **fields)


def captured(folder: Path) -> Path:
    """A folder with two captures of normal traffic and three of attacks."""
    camera, plug = "192.168.1.2", "192.168.1.3"
    write_pcap(folder / "day1.pcap", {camera: steady(200), plug: steady(60, 8883)})
    write_pcap(folder / "normal" / "home" / "day2.pcapng", {camera: steady(100, 53)})
    write_pcap(folder / "attack" / "scan_1.pcap", {camera: steady(50, 23)})
    write_pcap(folder / "attack" / "scan_2.pcap", {camera: steady(51, 23, start=9)})
    write_pcap(folder / "attack" / "syn-flood.cap", dict.fromkeys((camera, plug), steady(40, 80)))
    (folder / "README.txt").write_text("not a capture")
    return folder


def test_captures_in_a_folder(alone: Path) -> None:
    data = small(captured(alone / "captures")).load()
    assert data.name == "iot"
    assert list(data.attacks) == ["scan", "syn-flood"]
    # The camera's 101 packets in phase scan form one stream: 81 and 20, windows of 5: 20 and 4.
    assert [len(part) for part in data.attacks["scan"]] == [20, 4]
    ports = {name.split()[2] for name in names(data, data.x_train)}
    assert ports == {"dynamic>system", "dynamic<system", "dynamic>user", "dynamic<user"}
    # Test packets: 40 of the camera, 12 of the plug, and 20 of the camera's address in the other
    # home, where it is another device. Windows of 5: 9, 2 and 4.
    assert len(data.x_test) == 9 + 2 + 4
    assert data.spec == small(alone).spec


def test_skipped_frames_are_reported_once(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = captured(alone / "captures")
    path = folder / "day1.pcap"
    arp = bytes(12) + struct.pack(">H", 0x0806) + bytes(28)
    record = struct.pack("<IIII", 3, 0, len(arp), len(arp)) + arp
    path.write_bytes(path.read_bytes() + record + record[:20])
    small(folder).load()
    line = "260 packets; skipped 1 non-IP or damaged; the file is truncated"
    assert capsys.readouterr().err == f"{path}: {line}\n"
    small(folder).load()
    assert capsys.readouterr().err == ""


def test_devices_can_be_chosen(alone: Path) -> None:
    folder = captured(alone / "captures")
    data = small(folder, devices=["192.168.1.2"], client="device").load()
    ports = {name.split()[2] for name in names(data, data.x_train)}
    assert ports == {"dynamic>system", "dynamic<system"}  # 443 and 53, not the plug's 8883


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        *[("scan.pcap", "scan"), ("scan-2.pcap.gz", "scan"), ("syn_flood_03.pcapng", "syn_flood")],
        *[("mirai.2016.cap", "mirai"), ("2016.pcap", "attack"), ("v2_scan.PCAP", "v2_scan")],
        ("flood.pcap3", "flood"),
    ],
)
def test_the_file_name_gives_the_phase(name: str, phase: str) -> None:
    assert phase_of(Path("attack", name)) == phase


def test_captures_are_found_in_the_data_folders(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"length": 4, "symbols_min": 20, "symbols_max": 30}
    source = Iot(**settings)  # type: ignore[arg-type]
    error = rf"^{alone}/data/iot: no captures of normal traffic: put .*iot_sample needs no files$"
    with pytest.raises(UserError, match=error):
        source.load()
    with pytest.raises(UserError, match=r"^nowhere: no captures of normal traffic"):
        replace(source, path="nowhere").load()
    captured(alone / "data" / "iot")
    here = source.load()
    write_pcap(alone / "shared" / "iot" / "a.pcap", {"10.0.0.1": steady(100)})
    monkeypatch.setenv("FEDBENCH_DATA", str(alone / "shared"))
    assert len(source.load().x_train) < len(here.x_train)


def test_a_damaged_capture_is_named(alone: Path) -> None:
    folder = captured(alone / "captures")
    (folder / "day3.pcap").write_bytes(b"<html>")
    with pytest.raises(UserError, match=rf"^{folder}/day3\.pcap: starts with 3c 68"):
        small(folder).load()


def test_captures_are_read_again_only_after_a_change(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reads = captured(alone / "captures"), []

    def counting(path: Path) -> Any:
        reads.append(path.name)
        return read_capture(path)

    monkeypatch.setattr("fedbench.datasets.pcap.read_capture", counting)
    first = small(folder).load()
    assert len(reads) == 5
    again = small(folder, threshold=0.2, backdoors=[]).load()
    assert len(reads) == 5
    assert again.threshold == 0.2
    for name in ("x_train", "y_train", "x_test", "y_test", "owners"):
        assert torch.equal(getattr(first, name), getattr(again, name))
    assert first.vocabulary == again.vocabulary
    for phase, parts in first.attacks.items():
        assert all(map(torch.equal, parts, again.attacks[phase]))
    small(folder, symbols=12).load()
    assert len(reads) == 10
    os.utime(folder / "day1.pcap", ns=(1, 1))
    small(folder).load()
    assert len(reads) == 15
    write_pcap(folder / "attack" / "udp.pcap", {"192.168.1.2": steady(60)})
    assert "udp" in small(folder).load().attacks
    monkeypatch.setattr(iot, "VERSION", 99)
    small(folder).load()
    assert len(reads) == 15 + 6 + 6


@pytest.fixture(scope="module")
def sample_set() -> Sequences:
    return IotSample().load()


def test_the_sample_has_100_clients_and_four_phases(sample_set: Sequences) -> None:
    assert sample_set.owners is not None
    sizes = sample_set.owners.bincount() * 20
    assert len(sizes) == 100
    assert int(sizes.min()) > 1980
    assert int(sizes.max()) <= 3000
    assert (
        list(sample_set.attacks) == [*ATTACK_PHASES] == ["scan", "login", "syn_flood", "udp_flood"]
    )
    assert int(sample_set.x_train.max()) < 256
    assert len(sample_set.vocabulary) < 256  # so no packet is "other"
    assert int(sample_set.x_train.min()) > 0


def test_the_sample_is_the_same_in_every_process(sample_set: Sequences) -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    again = IotSample().load()
    assert torch.equal(again.x_train, sample_set.x_train)
    assert torch.equal(again.attacks["scan"][1], sample_set.attacks["scan"][1])


def test_attacks_mostly_use_normal_symbols(sample_set: Sequences) -> None:
    normal = set(sample_set.x_train.unique().tolist())
    for phase, (train, _) in sample_set.attacks.items():
        known = sum(int(number) in normal for number in train.flatten()) / train.numel()
        assert known > 0.4, phase


def test_synthetic_packets_are_plausible() -> None:
    made_up = normal_traffic(2 * len(DEVICE_TYPES), 500)
    assert len(made_up) == 2 * len(DEVICE_TYPES)
    for packets in made_up.values():
        assert len(packets["time"]) == 500
        assert (np.diff(packets["time"]) >= 0).all()
        assert packets["length"].min() >= 20
        assert packets["length"].max() <= 1500
        assert 0.2 < packets["outgoing"].mean() < 0.9
    distinct = {tuple(symbol_codes(packets).tolist()) for packets in made_up.values()}
    assert len(distinct) == len(made_up)  # every device is different
    for phase in attack_traffic(3, 200).values():
        assert [len(packets["time"]) for packets in phase] == [200] * 3


def test_synthetic_packets_survive_a_capture(tmp_path: Path) -> None:
    made_up = [*normal_traffic(len(DEVICE_TYPES), 400).values()]
    made_up += [packets for phase in attack_traffic(1, 400).values() for packets in phase]
    streams = {f"192.168.7.{i + 1}": packets for i, packets in enumerate(made_up)}
    capture = read_capture(write_pcap(tmp_path / "made.pcap", streams))
    assert (capture.n_skipped, capture.truncated) == (0, False)
    found = packets_by_device(capture)
    assert found.keys() == streams.keys()
    for device, packets in streams.items():
        assert symbol_codes(found[device]).tolist() == symbol_codes(packets).tolist()
