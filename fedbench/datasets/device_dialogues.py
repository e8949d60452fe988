"""Scripts for the synthetic traffic of home devices and of malware; nothing was captured.

A device repeats a few dialogues, each at its own pace: DNS and time lookups, long-lived
connections, uploads, announcements, and occasional rare events. The malware phases are those of
Mirai: it scans for telnet hosts, tries to log in, floods. They use ports, flags and lengths that
devices use too, so mostly their order is unusual.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedbench.datasets.packet_symbols import ACK, FIN, ICMP, NO_PORT, PSH, RST, SYN, TCP, UDP

IGMP = 2
# Random ports: drawn per dialogue, once per device, from the full range
EPHEMERAL, PERSISTENT, RANDOM = -2, -3, -4
NOW, SOON, REPLY, LATER = 0.0002, 0.008, 0.018, 0.4  # mean seconds after the previous packet


@dataclass(frozen=True)
class Step:
    """One packet of a dialogue."""

    outgoing: bool
    flags: int
    length: tuple[int, int]  # bytes of IP: least, most
    after: float = REPLY  # mean seconds after the previous packet


@dataclass(frozen=True)
class Part:
    """Steps repeated a random number of times, least to most; (0, 1) makes them optional."""

    steps: tuple[Step, ...]
    repeats: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class Dialogue:
    """Packets between one pair of ports."""

    protocol: int
    local: int
    remote: int
    parts: tuple[Part, ...]


def send(flags: int, low: int, high: int, after: float = SOON) -> Step:
    return Step(True, flags, (low, high), after)


def recv(flags: int, low: int, high: int, after: float = REPLY) -> Step:
    return Step(False, flags, (low, high), after)


def part(*steps: Step, repeats: tuple[int, int] = (1, 1)) -> Part:
    return Part(steps, repeats)


def tcp(remote: int, *parts: Part, local: int = EPHEMERAL) -> Dialogue:
    return Dialogue(TCP, local, remote, parts)


def udp(local: int, remote: int, *parts: Part) -> Dialogue:
    return Dialogue(UDP, local, remote, parts)


DATA = PSH | ACK  # flags of a segment with data
ACK_IN, ACK_OUT = recv(ACK, 52, 52), send(ACK, 52, 52, NOW)
SYN_OUT, SYN_ACK_IN = send(SYN, 60, 60), recv(SYN | ACK, 60, 60)
OPEN = part(SYN_OUT, SYN_ACK_IN, ACK_OUT)
CLOSE = part(send(FIN | ACK, 52, 52), recv(FIN | ACK, 52, 52), ACK_OUT)
HELLO = part(
    send(DATA, 260, 569, NOW),
    ACK_IN,
    recv(DATA, 1400, 1500, NOW),
    recv(DATA, 700, 1200, NOW),
    ACK_OUT,
    send(DATA, 130, 180),
    recv(DATA, 103, 150),
)
REQUEST = (send(DATA, 90, 150), ACK_IN, recv(DATA, 90, 150, SOON), ACK_OUT)

DIALOGUES = {
    "dns": udp(EPHEMERAL, 53, part(send(0, 56, 76), recv(0, 90, 220))),
    "ntp": udp(123, 123, part(send(0, 76, 76), recv(0, 76, 76))),
    "dhcp": udp(68, 67, part(send(0, 300, 340), recv(0, 300, 340))),
    "mdns": udp(5353, 5353, part(send(0, 90, 310, LATER), repeats=(1, 3))),
    "ssdp": udp(
        EPHEMERAL,
        1900,
        part(send(0, 130, 150, NOW), repeats=(2, 3)),
        part(recv(0, 330, 420), repeats=(0, 2)),
    ),
    "ping": Dialogue(ICMP, NO_PORT, NO_PORT, (part(send(0, 84, 84), recv(0, 84, 84)),)),
    "igmp": Dialogue(IGMP, NO_PORT, NO_PORT, (part(send(0, 32, 32)),)),
    "keep_alive": tcp(443, Part(REQUEST), local=PERSISTENT),
    "push": tcp(443, part(recv(DATA, 90, 150), ACK_OUT), local=PERSISTENT),
    "mqtt": tcp(8883, part(send(DATA, 60, 140), ACK_IN), local=PERSISTENT),
    "mqtt_ping": tcp(8883, part(send(DATA, 54, 54), recv(DATA, 54, 54), ACK_OUT), local=PERSISTENT),
    "tls": tcp(443, OPEN, HELLO, Part(REQUEST, (1, 3)), CLOSE),
    "parallel": tcp(  # two connections at once, e.g. for a page and its images
        443,
        part(SYN_OUT, send(SYN, 60, 60, NOW)),
        part(SYN_ACK_IN, recv(SYN | ACK, 60, 60, NOW), ACK_OUT),
        Part(REQUEST, (1, 2)),
        CLOSE,
    ),
    "http": tcp(
        80, OPEN, part(send(DATA, 160, 300, NOW), ACK_IN, recv(DATA, 330, 600, SOON)), CLOSE
    ),
    "upload": tcp(
        80,
        OPEN,
        part(send(DATA, 330, 500, NOW)),
        part(send(ACK, 1500, 1500, NOW), send(ACK, 1500, 1500, NOW), ACK_IN, repeats=(4, 16)),
        part(recv(DATA, 160, 300)),
        CLOSE,
    ),
    "video": udp(
        PERSISTENT,
        10001,
        part(
            send(0, 1300, 1400, REPLY),
            send(0, 1300, 1400, NOW),
            send(0, 400, 1200, NOW),
            repeats=(3, 8),
        ),
        part(recv(0, 60, 90), repeats=(0, 1)),
    ),
    "audio": tcp(
        443,
        part(recv(ACK, 1500, 1500), recv(DATA, 1500, 1500, NOW), ACK_OUT, repeats=(4, 12)),
        local=PERSISTENT,
    ),
    "poll": tcp(9999, OPEN, part(send(DATA, 80, 110, NOW), recv(DATA, 200, 310)), CLOSE),
    # Rare events
    "refused": tcp(443, part(SYN_OUT, recv(RST | ACK, 40, 40))),
    "resent": tcp(443, part(SYN_OUT, send(SYN, 60, 60, LATER), SYN_ACK_IN)),
    "reset": tcp(443, part(recv(RST, 40, 40)), local=PERSISTENT),
}

# Device type -> dialogue -> mean seconds between its starts
DEVICE_TYPES: Mapping[str, Mapping[str, float]] = {
    "camera": {"video": 3, "upload": 20, "keep_alive": 15, "dns": 30, "ntp": 60, "resent": 400},
    "doorbell": {"upload": 25, "tls": 30, "push": 12, "ping": 10, "dns": 30, "refused": 400},
    "plug": {"mqtt": 4, "mqtt_ping": 15, "dns": 40, "ntp": 64, "dhcp": 300, "reset": 900},
    "bulb": {"mqtt_ping": 10, "poll": 8, "mdns": 20, "dns": 40, "igmp": 60, "refused": 500},
    "thermostat": {"tls": 40, "keep_alive": 10, "ntp": 60, "http": 50, "dns": 20, "parallel": 30},
    "hub": {"keep_alive": 5, "push": 6, "mdns": 15, "ssdp": 20, "poll": 10, "parallel": 15},
    "speaker": {"audio": 6, "keep_alive": 15, "mdns": 20, "dns": 15, "tls": 40, "ntp": 90},
    "sensor": {"http": 15, "dns": 15, "ntp": 60, "parallel": 40, "refused": 400},
    "vacuum": {"mqtt": 3, "mqtt_ping": 20, "upload": 60, "tls": 60, "dns": 30, "igmp": 90},
}

TELNET = (
    OPEN,
    part(recv(DATA, 55, 79)),
    part(send(DATA, 54, 66), recv(DATA, 54, 79), repeats=(2, 5)),
    CLOSE,
)
PROBE = send(SYN, 40, 60)
# Attack phase -> dialogues and mean seconds between their starts
ATTACK_PHASES: Mapping[str, tuple[tuple[Dialogue, float], ...]] = {
    "scan": (
        (tcp(23, part(PROBE)), 0.008),
        (tcp(2323, part(PROBE)), 0.07),
        (tcp(23, part(PROBE, recv(RST | ACK, 40, 40))), 0.06),
        (tcp(23, part(PROBE, SYN_ACK_IN, send(RST, 40, 40, NOW))), 0.3),
    ),
    "login": ((tcp(23, *TELNET), 1.0), (tcp(2323, *TELNET), 6.0)),
    "syn_flood": ((tcp(80, part(PROBE)), 0.0004), (tcp(80, part(PROBE, SYN_ACK_IN)), 0.01)),
    "udp_flood": (
        (udp(EPHEMERAL, RANDOM, part(send(0, 540, 540))), 0.0005),
        (udp(EPHEMERAL, RANDOM, part(send(0, 1300, 1400))), 0.003),
    ),
}
