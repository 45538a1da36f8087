"""The comparison's table of ratios against their goals, and its plot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Engines = dict[str, dict[str, Any]]
PEERS = ("llama.cpp", "llama.cpp Q4_0", "vLLM")
_BF16_PEERS = ("llama.cpp BF16", None, "vLLM")

# Name, key, our engine, the peers of the three columns, the goal against each, whether less is better.
ROWS: tuple[tuple[str, str, str, tuple[str | None, ...], tuple[float | None, ...], bool], ...] = (
    ("decode, 1 sequence", "decode_1", "pagedserve", PEERS, (2.5, 2.2, 14), False),
    ("decode, 8", "decode_8", "pagedserve", PEERS, (3.5, 2.7, 7), False),
    ("decode, 32", "decode_32", "pagedserve", PEERS, (4, 2.5, 5), False),
    ("prefill 512", "prefill_512", "pagedserve", PEERS, (4, 2, 2.5), False),
    ("decode, 1, bf16 weights", "decode_1", "pagedserve bf16", _BF16_PEERS, (1.5, None, 6), False),
    ("decode, 8, bf16 weights", "decode_8", "pagedserve bf16", _BF16_PEERS, (2, None, 5), False),
    ("decode, 32, bf16 weights", "decode_32", "pagedserve bf16", _BF16_PEERS, (2, None, 3.5), False),
    ("HTTP, 16 clients, shared prefix of 500", "http_16", "pagedserve", PEERS, (4, 3, 6), False),
    ("command to first token, warm", "first_token_s", "pagedserve", PEERS, (2, None, 1 / 8), True),
    ("peak memory, serving 32", "memory_mib", "pagedserve", PEERS, (1.5, None, 1 / 3), True),
)
_UNITS = {"first_token_s": "s", "memory_mib": "MiB"}


def as_markdown(engines: Engines) -> str:
    """One row a measure: our figure, and for each peer its figure, the ratio, the goal, and whether it is reached."""
    lines = ["| | pagedserve | llama.cpp, same Q4_1 file | llama.cpp, Q4_0 | vLLM, fp32 |", "|---|---|---|---|---|"]
    for name, key, ours, peers, goals, less in ROWS:
        figure = _figure(engines, ours, key)
        columns = zip(peers, goals, strict=True)
        cells = [_cell(engines, key, figure, peer, goal, less) if peer else "" for peer, goal in columns]
        shown = "not measured" if figure is None else f"{figure:g} {_UNITS.get(key, 'tok/s')}"
        lines.append(f"| {name} | {shown} | {' | '.join(cells)} |")
    libraries = _figure(engines, "pagedserve", "memory_torch_libraries_mib")
    if libraries is not None:
        lines += ["", f"Against llama.cpp our memory counts without torch's own libraries ({libraries:g} MiB of ours)."]
    for engine, found in engines.items():
        lines += [f"Not measured, {engine}: {error}" for error in found.get("errors", ())]
        idle = [f"{found[key]:.0%}" for key in ("idle", "idle_server") if key in found]
        lines.append(f"CPU idle before {engine}: {', '.join(idle) or 'unknown'}")
    return "\n".join(lines)


def _figure(engines: Engines, engine: str, key: str) -> float | None:
    return engines.get(engine, {}).get(key)


def _cell(engines: Engines, key: str, ours: float | None, peer: str, goal: float | None, less: bool) -> str:
    theirs = _figure(engines, peer, key)
    if ours is None or not theirs:
        return "not measured"
    if key == "memory_mib" and peer.startswith("llama"):
        ours -= engines["pagedserve"].get("memory_torch_libraries_mib", 0)
    ratio = ours / theirs
    if goal is None:
        return f"{theirs:g}: {ratio:.2f}x"
    reached = ratio <= goal if less else ratio >= goal
    compare: Callable[[float], str] = (lambda x: f"<= {x:.3g}x") if less else (lambda x: f">= {x:g}x")
    return f"{theirs:g}: {ratio:.2f}x ({compare(goal)}: {'reached' if reached else '**not reached**'})"


def plot(engines: Engines, path: Path) -> None:
    """Output tokens a second over HTTP against the number of clients, one line an engine."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4), dpi=150)
    for engine in ("pagedserve", "llama.cpp", "vLLM"):
        points = [(n, engines.get(engine, {}).get(f"http_{n}")) for n in (1, 8, 32)]
        points = [(n, rate) for n, rate in points if rate is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=engine)
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8, 16, 32], labels=["1", "2", "4", "8", "16", "32"])
    axes.set_xlabel("clients at once")
    axes.set_ylabel("output tokens a second, all together")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.tight_layout()
    figure.savefig(path)
