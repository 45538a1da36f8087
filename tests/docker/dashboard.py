"""The shipped Grafana dashboard as a test reads it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCKER = Path(__file__).parents[2] / "docker"
PATH = DOCKER / "grafana" / "dashboards" / "pagedserve.json"


def panels() -> list[dict[str, Any]]:
    """All panels but the headings of rows."""
    return [panel for panel in json.loads(PATH.read_text(encoding="utf-8"))["panels"] if panel["type"] != "row"]


def queries() -> list[tuple[str, str]]:
    """(panel's title, PromQL) of every query."""
    return [(panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]]


def metric_names(query: str) -> set[str]:
    """Names of the series in a query."""
    return set(re.findall(r"[a-z]+:[a-z0-9_]+", query))
