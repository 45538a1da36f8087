"""How the core drives its workers: one face, one class a transport."""

from __future__ import annotations

from pagedserve.executor.base import Executor
from pagedserve.registry import Registry

EXECUTORS: Registry[type[Executor]] = Registry(
    "executor",
    {
        "inline": "pagedserve.executor.inline:InlineExecutor",
        "null": "pagedserve.executor.null:NullExecutor",
    },
)

__all__ = ["EXECUTORS", "Executor"]
