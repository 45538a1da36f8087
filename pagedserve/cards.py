"""GPUs by name: what a plan needs to know of a card that is not here. Numbers are those of the vendors' data sheets."""

from __future__ import annotations

from dataclasses import dataclass

from pagedserve.errors import ConfigError

# What kernels reach of a data sheet: copies 90 % of the bandwidth, large products 80 % of the rate.
REACHED_BANDWIDTH = 0.9
REACHED_RATE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One GPU. `bandwidth` in bytes/s, `rate` in multiply-adds a second times 2, dense, with 16-bit operands."""

    name: str
    memory_bytes: int
    bandwidth: float
    rate: float


def _card(name: str, gib: float, gigabytes_per_second: float, teraflops: float) -> Card:
    return Card(name=name, memory_bytes=int(gib * 2**30), bandwidth=gigabytes_per_second * 1e9, rate=teraflops * 1e12)


# Memory is what the driver reports, a little less than what is printed on the box.
CARDS = (
    _card("A100-40", 39.4, 1555, 312),
    _card("A100-80", 79.2, 2039, 312),
    _card("H100", 79.1, 3350, 989),
    _card("H100-PCIe", 79.2, 2000, 756),
    _card("H100-NVL", 93.1, 3900, 835),
    _card("H200", 139.8, 4800, 989),
    _card("GH200", 94.5, 4000, 989),
    _card("B200", 178.4, 8000, 2250),
    _card("L4", 22.0, 300, 121),
    _card("L40S", 44.4, 864, 362),
    _card("A10", 22.1, 600, 125),
    _card("T4", 14.6, 320, 65),
    _card("V100-32", 31.7, 900, 125),
    _card("A6000", 47.4, 768, 155),
    _card("RTX-6000-Ada", 47.4, 960, 364),
    _card("3090", 23.6, 936, 71),
    _card("4090", 23.6, 1008, 165),
    _card("5090", 31.4, 1792, 210),
)


def card_named(name: str) -> Card:
    """The card of that name, in any case and with or without "RTX", "NVIDIA" and spaces; ConfigError lists them all."""
    wanted = _plain(name)
    for card in CARDS:
        if _plain(card.name) == wanted:
            return card
    raise ConfigError(
        f"--card {name}: known are {', '.join(card.name for card in CARDS)}; for another one give --device-memory"
    )


def _plain(name: str) -> str:
    plain = name.lower().replace("nvidia", "").replace("geforce", "")
    plain = "".join(letter for letter in plain if letter.isalnum())
    return plain.removeprefix("rtx").removesuffix("gb")
