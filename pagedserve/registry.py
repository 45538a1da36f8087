"""Lazy registries: a name maps to the string "module:attribute", imported on first use.

A string table is greppable, costs nothing at import, and lets a test prove that every entry exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Generic, TypeVar

from pagedserve.errors import ConfigError

T = TypeVar("T")


def load(target: str) -> Any:
    """Import `"module:attribute"` and return the attribute."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


class Registry(Mapping[str, str], Generic[T]):
    """Ordered table of `name -> "module:attribute"`; order is preference where one is chosen by default."""

    def __init__(self, kind: str, entries: dict[str, str]):
        self.kind = kind
        self._entries = entries

    def __getitem__(self, name: str) -> str:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def resolve(self, name: str) -> T:
        """Import and return the entry, or raise `ConfigError` that lists what is known."""
        if name not in self._entries:
            raise ConfigError(f"unknown {self.kind} {name!r}; known: {', '.join(self._entries)}")
        return load(self._entries[name])
