"""From lines of results to one JSON file and a short table."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.check import read

# The reply from a lent machine carries the end of the output only.
_MOST_FAILURES = 25
_MOST_VALUES = 90
_WIDTH = 114


def finish(results: Path, target: Path, *, seconds: float, scale: str, device: str) -> bool:
    """Writes the file and prints the table; True where something failed or missed its goal."""
    rows = read(results)
    summary = {
        "scale": scale,
        "device": device,
        "seconds": round(seconds, 1),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "rows": rows,
    }
    target.write_text(json.dumps(summary, default=str, indent=0), encoding="utf-8")
    for line in table(rows, seconds):
        print(line[:_WIDTH], flush=True)
    return bool(failures(rows)) or any(row["met"] is False for row in values(rows))


def values(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["kind"] == "value"]


def failures(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What raised, what took its process with it, and phases that did not end by themselves."""
    ended = {(row["phase"], row["name"]) for row in rows if row["kind"] in ("ended", "failed")}
    lost = [
        {**row, "note": "it took its process with it, or was running when time was over"}
        for row in rows
        if row["kind"] == "begun" and (row["phase"], row["name"]) not in ended
    ]
    broken = [
        {**row, "note": row["status"]}
        for row in rows
        if row["kind"] == "phase" and not row["status"].startswith(("done", "skipped"))
    ]
    return [row for row in rows if row["kind"] == "failed"] + lost + broken


def table(rows: list[dict[str, Any]], seconds: float) -> Iterator[str]:
    """Goals first, then the other numbers, then what went wrong."""
    found = values(rows)
    goals = [row for row in found if row["met"] is not None and (row["goal"] is not True or row["met"] is False)]
    passed = sum(row["goal"] is True and row["met"] for row in found)
    others = [row for row in found if row["met"] is None and not row.get("quiet")]
    yield ""
    yield f"{'figure':46}{'value':>14} {'unit':14}{'goal':>9}  "
    for row in others[:_MOST_VALUES]:
        yield _line(row)
    if len(others) > _MOST_VALUES:
        yield f"... and {len(others) - _MOST_VALUES} more in the file"
    yield "-- against goals"
    for row in goals:
        yield _line(row)
    wrong = failures(rows)
    if wrong:
        yield "-- went wrong"
    for row in wrong[:_MOST_FAILURES]:
        yield f"{row['phase']}: {row['name']}: {row.get('note', '')}"
    if len(wrong) > _MOST_FAILURES:
        yield f"... and {len(wrong) - _MOST_FAILURES} more in the file"
    missed = sum(row["met"] is False for row in found)
    numeric = [row for row in goals if row["goal"] is not True]
    yield (
        f"{passed} checks passed; {sum(bool(row['met']) for row in numeric)} of {len(numeric)} goals met; "
        f"{missed} missed or failed, {len(wrong)} went wrong; {seconds:.0f} s"
    )


def _line(row: dict[str, Any]) -> str:
    value, goal = row["value"], row["goal"]
    shown = f"{value:.4g}" if isinstance(value, float) and abs(value) >= 1e6 else f"{value}"
    verdict = "" if row["met"] is None else "met" if row["met"] else "MISSED"
    wanted = "" if goal is None or goal is True else f"{goal:g}"
    return f"{row['name'][:46]:46}{shown[:40]:>14} {row['unit']:14}{wanted:>9}  {verdict:7}{row['note']}"
