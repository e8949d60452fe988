"""Generated traffic of devices at home, and of malware on them. Nothing here was captured.

Each device goes through the dialogues of its type with its own pace, delays and ports, and with
jitter in times and sizes. Everything is drawn from a fixed seed: it is the same in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedbench.datasets.device_dialogues import (
    DIALOGUES,
    EPHEMERAL,
    KEPT,
    PHASES,
    RANDOM,
    TYPES,
    Dialogue,
    Step,
)
from fedbench.datasets.packet_symbols import Ints, Packets

SEED = 180407474
# Shapes of the gamma distributions of times, from dialogue to dialogue and from packet to packet;
# a higher one is steadier
PACE, DELAY = 4.0, 12.0


@dataclass(frozen=True)
class Character:
    """What makes a device differ from others of its type."""

    pace: float  # of dialogues, 1: as the type says
    delay: float  # of packets
    ports: tuple[int, int]  # ephemeral ones, from and below
    kept: int  # port of its open connections

    @classmethod
    def drawn(cls, rng: np.random.Generator) -> Character:
        """Ports as Linux picks them, or small systems do."""
        ports = ((32768, 61000), (49152, 65536))[int(rng.integers(2))]
        pace, delay = rng.uniform(0.7, 1.4, 2)
        return cls(float(pace), float(delay), ports, int(rng.integers(*ports)))


def normal_traffic(n_devices: int, n_packets: int) -> dict[str, Packets]:
    """Devices, all types in turn, with `n_packets` each."""
    made = {}
    for i in range(n_devices):
        kind = list(TYPES)[i % len(TYPES)]
        rng = np.random.default_rng([SEED, 0, i])
        who = Character.drawn(rng)
        spoken = [(DIALOGUES[name], every / who.pace) for name, every in TYPES[kind].items()]
        made[f"{kind} {i // len(TYPES)}"] = converse(spoken, who, n_packets, rng)
    return made


def attack_traffic(n_devices: int, n_packets: int) -> dict[str, list[Packets]]:
    """Phase -> packets of infected devices, `n_packets` each; the normal ones are left out."""
    made: dict[str, list[Packets]] = {}
    for number, (phase, spoken) in enumerate(PHASES.items()):
        rngs = [np.random.default_rng([SEED, 1 + number, i]) for i in range(n_devices)]
        made[phase] = [converse(spoken, Character.drawn(rng), n_packets, rng) for rng in rngs]
    return made


def converse(
    spoken: Sequence[tuple[Dialogue, float]],
    who: Character,
    n_packets: int,
    rng: np.random.Generator,
) -> Packets:
    """The first packets of all dialogues at once, each begun every so many seconds."""
    rate = sum(_mean_length(dialogue) / every for dialogue, every in spoken)
    span = 1.3 * n_packets / rate + 2 * max(every for _, every in spoken)
    everything = Packets.join([_say(dialogue, every, span, who, rng) for dialogue, every in spoken])
    return everything.at(np.argsort(everything.time, kind="stable")[:n_packets])


def _mean_length(dialogue: Dialogue) -> float:
    return sum(len(part.steps) * sum(part.repeats) / 2 for part in dialogue.parts)


def _say(
    dialogue: Dialogue, every: float, span: float, who: Character, rng: np.random.Generator
) -> Packets:
    """A dialogue again and again for `span` seconds: k times M steps, some of them left out."""
    waits = every * rng.gamma(PACE, 1 / PACE, int(1.2 * span / every) + 5)
    starts = np.cumsum(waits)
    starts = starts[starts < span]  # [k]
    k = len(starts)
    listed: list[Step] = []
    said = []
    for part in dialogue.parts:
        low, high = part.repeats
        times = rng.integers(low, high + 1, (k, 1))  # [k, 1]
        listed += part.steps * high
        said.append(np.repeat(np.arange(high), len(part.steps)) < times)  # [k, high * steps]
    spoken = np.concatenate(said, axis=1)  # [k, M]
    waits = np.array([step.after for step in listed]) * who.delay
    delays = rng.gamma(DELAY, waits / DELAY, (k, len(listed))) * spoken
    bounds = np.array([step.length for step in listed])
    lengths = rng.integers(bounds[:, 0], bounds[:, 1] + 1, (k, len(listed)))

    def column(values: Ints | list[int] | list[bool]) -> Ints:
        """What each packet has, of what each step or each time has."""
        return np.broadcast_to(np.asarray(values), spoken.shape)[spoken].astype(np.int32)

    return Packets(
        time=(starts[:, None] + delays.cumsum(axis=1))[spoken],
        outgoing=column([step.outgoing for step in listed]).astype(bool),
        protocol=column([dialogue.protocol]),
        local_port=column(_ports(dialogue.local, k, who, rng)[:, None]),
        remote_port=column(_ports(dialogue.remote, k, who, rng)[:, None]),
        flags=column([step.flags for step in listed]),
        length=lengths[spoken].astype(np.int32),
    )


def _ports(port: int, k: int, who: Character, rng: np.random.Generator) -> Ints:
    """A port for each of k times [k]."""
    spans = {EPHEMERAL: who.ports, RANDOM: (1, 65536), KEPT: (who.kept, who.kept + 1)}
    return rng.integers(*spans.get(port, (port, port + 1)), k).astype(np.int32)
