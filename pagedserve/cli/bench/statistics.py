"""Mean, median and percentiles of latencies, and how they are printed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def summarize(seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """`{"mean": …, "median": …, "p99": …}` in milliseconds; None where nothing was measured."""
    names = ["mean", "median", *(f"p{p:g}" for p in percentiles)]
    if not seconds:
        return dict.fromkeys(names)
    values = np.asarray(seconds) * 1e3
    numbers = [float(values.mean()), *np.percentile(values, [50, *percentiles]).tolist()]
    return {name: round(number, 3) for name, number in zip(names, numbers, strict=True)}


def parse_percentiles(text: str) -> list[float]:
    """`"50,99"` as numbers; ValueError otherwise, which argparse reports."""
    values = [float(part) for part in text.split(",")]
    if not all(0 <= value <= 100 for value in values):
        raise ValueError(text)
    return values


def print_table(title: str, rows: dict[str, object]) -> None:
    """Names on the left, values on the right."""
    print(f"{title:=^60}")
    for name, value in rows.items():
        shown = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
        print(f"{name:<44}{shown:>16}")
    print("=" * 60)
