"""What devices at home say, and malware on them: made up for generated traffic, nothing captured.

A device repeats a few dialogues, each at its own pace: lookups of names and time, connections that
stay open, uploads, announcements, and now and then a rare event. The malware's phases are those of
Mirai: it scans for hosts with telnet, tries to log in, floods. They use the ports, flags and
lengths that devices use too: what is odd is mostly their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedbench.datasets.packet_symbols import (
    ACK,
    FIN,
    ICMP,
    NO_PORT,
    PSH,
    RST,
    SYN,
    TCP,
    UDP,
)

IGMP = 2
# Ports that are drawn: for each dialogue anew, once for a device, anything
EPHEMERAL, KEPT, RANDOM = -2, -3, -4
NOW, SOON, REPLY, LATER = 0.0002, 0.008, 0.018, 0.4  # seconds after the packet before, on average


@dataclass(frozen=True)
class Step:
    """A packet of a dialogue."""

    outgoing: bool
    flags: int
    length: tuple[int, int]  # bytes of IP, from and to
    after: float = REPLY  # seconds


@dataclass(frozen=True)
class Part:
    """Steps that are repeated a random number of times; (0, 1): they may be left out."""

    steps: tuple[Step, ...]
    repeats: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class Dialogue:
    """What is said over one pair of ports."""

    protocol: int
    local: int
    remote: int
    parts: tuple[Part, ...]


def sent(flags: int, low: int, high: int, after: float = SOON) -> Step:
    return Step(True, flags, (low, high), after)


def got(flags: int, low: int, high: int, after: float = REPLY) -> Step:
    return Step(False, flags, (low, high), after)


def steps(*listed: Step, repeats: tuple[int, int] = (1, 1)) -> Part:
    return Part(listed, repeats)


def tcp(remote: int, *parts: Part, local: int = EPHEMERAL) -> Dialogue:
    return Dialogue(TCP, local, remote, parts)


def udp(local: int, remote: int, *parts: Part) -> Dialogue:
    return Dialogue(UDP, local, remote, parts)


OPEN = steps(sent(SYN, 60, 60), got(SYN | ACK, 60, 60), sent(ACK, 52, 52, NOW))
CLOSE = steps(sent(FIN | ACK, 52, 52), got(FIN | ACK, 52, 52), sent(ACK, 52, 52, NOW))
HELLO = steps(
    sent(PSH | ACK, 260, 569, NOW),
    got(ACK, 52, 52),
    got(PSH | ACK, 1400, 1500, NOW),
    got(PSH | ACK, 700, 1200, NOW),
    sent(ACK, 52, 52, NOW),
    sent(PSH | ACK, 130, 180),
    got(PSH | ACK, 103, 150),
)
ASK = steps(sent(PSH | ACK, 90, 150), got(ACK, 52, 52), got(PSH | ACK, 90, 150, SOON))
ASKED = (*ASK.steps, sent(ACK, 52, 52, NOW))

DIALOGUES = {
    "dns": udp(EPHEMERAL, 53, steps(sent(0, 56, 76), got(0, 90, 220))),
    "ntp": udp(123, 123, steps(sent(0, 76, 76), got(0, 76, 76))),
    "dhcp": udp(68, 67, steps(sent(0, 300, 340), got(0, 300, 340))),
    "mdns": udp(5353, 5353, steps(sent(0, 90, 310, LATER), repeats=(1, 3))),
    "ssdp": udp(
        EPHEMERAL,
        1900,
        steps(sent(0, 130, 150, NOW), repeats=(2, 3)),
        steps(got(0, 330, 420), repeats=(0, 2)),
    ),
    "ping": Dialogue(ICMP, NO_PORT, NO_PORT, (steps(sent(0, 84, 84), got(0, 84, 84)),)),
    "group": Dialogue(IGMP, NO_PORT, NO_PORT, (steps(sent(0, 32, 32)),)),
    "keep_alive": tcp(443, Part(ASKED), local=KEPT),
    "push": tcp(443, steps(got(PSH | ACK, 90, 150), sent(ACK, 52, 52, NOW)), local=KEPT),
    "mqtt": tcp(8883, steps(sent(PSH | ACK, 60, 140), got(ACK, 52, 52)), local=KEPT),
    "mqtt_ping": tcp(
        8883,
        steps(sent(PSH | ACK, 54, 54), got(PSH | ACK, 54, 54), sent(ACK, 52, 52, NOW)),
        local=KEPT,
    ),
    "tls": tcp(443, OPEN, HELLO, Part(ASKED, (1, 3)), CLOSE),
    "both": tcp(  # two connections opened at once, as for a page and its pictures
        443,
        steps(sent(SYN, 60, 60), sent(SYN, 60, 60, NOW)),
        steps(got(SYN | ACK, 60, 60), got(SYN | ACK, 60, 60, NOW), sent(ACK, 52, 52, NOW)),
        Part(ASKED, (1, 2)),
        CLOSE,
    ),
    "http": tcp(
        80,
        OPEN,
        steps(sent(PSH | ACK, 160, 300, NOW), got(ACK, 52, 52), got(PSH | ACK, 330, 600, SOON)),
        CLOSE,
    ),
    "upload": tcp(
        80,
        OPEN,
        steps(sent(PSH | ACK, 330, 500, NOW)),
        steps(
            sent(ACK, 1500, 1500, NOW),
            sent(ACK, 1500, 1500, NOW),
            got(ACK, 52, 52),
            repeats=(4, 16),
        ),
        steps(got(PSH | ACK, 160, 300)),
        CLOSE,
    ),
    "video": udp(
        KEPT,
        10001,
        steps(
            sent(0, 1300, 1400, REPLY),
            sent(0, 1300, 1400, NOW),
            sent(0, 400, 1200, NOW),
            repeats=(3, 8),
        ),
        steps(got(0, 60, 90), repeats=(0, 1)),
    ),
    "audio": tcp(
        443,
        steps(
            got(ACK, 1500, 1500),
            got(PSH | ACK, 1500, 1500, NOW),
            sent(ACK, 52, 52, NOW),
            repeats=(4, 12),
        ),
        local=KEPT,
    ),
    "poll": tcp(9999, OPEN, steps(sent(PSH | ACK, 80, 110, NOW), got(PSH | ACK, 200, 310)), CLOSE),
    # Rare events
    "refused": tcp(443, steps(sent(SYN, 60, 60), got(RST | ACK, 40, 40))),
    "lost": tcp(443, steps(sent(SYN, 60, 60), sent(SYN, 60, 60, LATER), got(SYN | ACK, 60, 60))),
    "broken": tcp(443, steps(got(RST, 40, 40)), local=KEPT),
}

# Type -> its dialogues and the seconds between them, on average
TYPES: Mapping[str, Mapping[str, float]] = {
    "camera": {"video": 3, "upload": 20, "keep_alive": 15, "dns": 30, "ntp": 60, "lost": 400},
    "doorbell": {"upload": 25, "tls": 30, "push": 12, "ping": 10, "dns": 30, "refused": 400},
    "plug": {"mqtt": 4, "mqtt_ping": 15, "dns": 40, "ntp": 64, "dhcp": 300, "broken": 900},
    "bulb": {"mqtt_ping": 10, "poll": 8, "mdns": 20, "dns": 40, "group": 60, "refused": 500},
    "thermostat": {"tls": 40, "keep_alive": 10, "ntp": 60, "http": 50, "dns": 20, "both": 30},
    "hub": {"keep_alive": 5, "push": 6, "mdns": 15, "ssdp": 20, "poll": 10, "both": 15},
    "speaker": {"audio": 6, "keep_alive": 15, "mdns": 20, "dns": 15, "tls": 40, "ntp": 90},
    "sensor": {"http": 15, "dns": 15, "ntp": 60, "both": 40, "refused": 400},
    "vacuum": {"mqtt": 3, "mqtt_ping": 20, "upload": 60, "tls": 60, "dns": 30, "group": 90},
}

TELNET = (
    OPEN,
    steps(got(PSH | ACK, 55, 79)),
    steps(sent(PSH | ACK, 54, 66), got(PSH | ACK, 54, 79), repeats=(2, 5)),
    CLOSE,
)
# Phase of an attack -> its dialogues and the seconds between them
PHASES: Mapping[str, tuple[tuple[Dialogue, float], ...]] = {
    "scan": (
        (tcp(23, steps(sent(SYN, 40, 60))), 0.008),
        (tcp(2323, steps(sent(SYN, 40, 60))), 0.07),
        (tcp(23, steps(sent(SYN, 40, 60), got(RST | ACK, 40, 40))), 0.06),
        (tcp(23, steps(sent(SYN, 40, 60), got(SYN | ACK, 60, 60), sent(RST, 40, 40, NOW))), 0.3),
    ),
    "login": ((tcp(23, *TELNET), 1.0), (tcp(2323, *TELNET), 6.0)),
    "syn_flood": (
        (tcp(80, steps(sent(SYN, 40, 60))), 0.0004),
        (tcp(80, steps(sent(SYN, 40, 60), got(SYN | ACK, 60, 60))), 0.01),
    ),
    "udp_flood": (
        (udp(EPHEMERAL, RANDOM, steps(sent(0, 540, 540))), 0.0005),
        (udp(EPHEMERAL, RANDOM, steps(sent(0, 1300, 1400))), 0.003),
    ),
}
