"""Synthetic traffic of home devices, and of malware on them. Nothing here was captured.

Each device repeats the dialogues of its type with its own pace, delays and ports, and with jitter
in times and sizes. The seed is fixed, so every run sees the same packets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedbench.datasets.device_dialogues import (
    ATTACK_PHASES,
    DEVICE_TYPES,
    DIALOGUES,
    EPHEMERAL,
    PERSISTENT,
    RANDOM,
    Dialogue,
    Step,
)
from fedbench.datasets.packet_symbols import PACKET, Bools, Ints, Packets

SEED = 180407474
# Shape parameters of the gamma distributions of times between dialogues and between packets. A
# larger value means less jitter.
PACE_SHAPE, DELAY_SHAPE = 4.0, 12.0

Schedule = Sequence[tuple[Dialogue, float]]  # dialogues and mean seconds between their starts


@dataclass(frozen=True)
class DeviceProfile:
    """What distinguishes a device from others of its type."""

    pace: float  # of dialogues, relative to the type
    delay: float  # between packets, relative to the type
    ports: tuple[int, int]  # ephemeral ports: first, last + 1
    persistent_port: int  # of its long-lived connections

    @classmethod
    def draw(cls, rng: np.random.Generator) -> DeviceProfile:
        """Draw a profile; ports come from the range of Linux or of small systems."""
        ports = ((32768, 61000), (49152, 65536))[int(rng.integers(2))]
        pace, delay = rng.uniform(0.7, 1.4, 2)
        return cls(float(pace), float(delay), ports, int(rng.integers(*ports)))


def normal_traffic(n_devices: int, n_packets: int) -> dict[str, Packets]:
    """Generate `n_packets` for each of `n_devices`, cycling through the device types."""
    traffic = {}
    for i in range(n_devices):
        kind = list(DEVICE_TYPES)[i % len(DEVICE_TYPES)]
        rng = np.random.default_rng([SEED, 0, i])
        device = DeviceProfile.draw(rng)
        pauses = DEVICE_TYPES[kind].items()
        schedule = [(DIALOGUES[name], every / device.pace) for name, every in pauses]
        packets = generate_packets(schedule, device, n_packets, rng)
        traffic[f"{kind} {i // len(DEVICE_TYPES)}"] = packets
    return traffic


def attack_traffic(n_devices: int, n_packets: int) -> dict[str, list[Packets]]:
    """Generate `n_packets` of malware for each infected device and phase; no normal packets."""
    traffic: dict[str, list[Packets]] = {}
    for number, (phase, schedule) in enumerate(ATTACK_PHASES.items()):
        rngs = [np.random.default_rng([SEED, 1 + number, i]) for i in range(n_devices)]
        traffic[phase] = [
            generate_packets(schedule, DeviceProfile.draw(rng), n_packets, rng) for rng in rngs
        ]
    return traffic


def generate_packets(
    schedule: Schedule, device: DeviceProfile, n_packets: int, rng: np.random.Generator
) -> Packets:
    """Run all dialogues concurrently and return the first `n_packets`."""
    rate = sum(_mean_length(dialogue) / every for dialogue, every in schedule)
    span = 1.3 * n_packets / rate + 2 * max(every for _, every in schedule)
    packets = np.concatenate([_repeat(*entry, span, device, rng) for entry in schedule])
    return packets[np.argsort(packets["time"], kind="stable")[:n_packets]]


def _mean_length(dialogue: Dialogue) -> float:
    return sum(len(part.steps) * sum(part.repeats) / 2 for part in dialogue.parts)


def _repeat(
    dialogue: Dialogue, every: float, span: float, device: DeviceProfile, rng: np.random.Generator
) -> Packets:
    """Repeat a dialogue for `span` seconds: k runs of M steps, some of them skipped."""
    starts = np.cumsum(every * rng.gamma(PACE_SHAPE, 1 / PACE_SHAPE, int(1.2 * span / every) + 5))
    starts = starts[starts < span]  # [k]
    steps, present = _draw_steps(dialogue, len(starts), rng)  # M, [k, M]
    mean_delays = np.array([step.after for step in steps]) * device.delay  # [M]
    delays = rng.gamma(DELAY_SHAPE, mean_delays / DELAY_SHAPE, present.shape) * present
    shortest, longest = np.array([step.length for step in steps]).T  # [M] each
    packets = np.empty(present.shape, PACKET)  # [k, M]
    packets["time"] = starts[:, None] + delays.cumsum(axis=1)
    packets["outgoing"] = [step.outgoing for step in steps]
    packets["protocol"] = dialogue.protocol
    packets["flags"] = [step.flags for step in steps]
    packets["length"] = rng.integers(shortest, longest + 1, present.shape)
    packets["local_port"] = _draw_ports(dialogue.local, len(starts), device, rng)
    packets["remote_port"] = _draw_ports(dialogue.remote, len(starts), device, rng)
    return packets[present]


def _draw_steps(dialogue: Dialogue, k: int, rng: np.random.Generator) -> tuple[list[Step], Bools]:
    """Return all M possible steps, and which of them occur in each of k runs [k, M]."""
    steps: list[Step] = []
    present = []
    for part in dialogue.parts:
        low, high = part.repeats
        n_repeats = rng.integers(low, high + 1, (k, 1))  # [k, 1]
        steps += part.steps * high
        present.append(np.repeat(np.arange(high), len(part.steps)) < n_repeats)
    return steps, np.concatenate(present, axis=1)


def _draw_ports(port: int, k: int, device: DeviceProfile, rng: np.random.Generator) -> Ints:
    """Draw a port for each of k runs [k, 1]."""
    port = device.persistent_port if port == PERSISTENT else port
    ranges = {EPHEMERAL: device.ports, RANDOM: (1, 65536)}
    return rng.integers(*ranges.get(port, (port, port + 1)), (k, 1)).astype(np.int32)
