"""Registries resolve late and say what they know."""

from __future__ import annotations

import pytest

from pagedserve.errors import ConfigError
from pagedserve.registry import Registry


def test_an_entry_is_imported_on_use_only() -> None:
    registry: Registry = Registry("thing", {"good": "collections:OrderedDict", "bad": "no_such_module:Thing"})
    assert registry.resolve("good").__name__ == "OrderedDict"
    with pytest.raises(ModuleNotFoundError):
        registry.resolve("bad")


def test_an_unknown_name_lists_the_known_ones_in_order() -> None:
    registry: Registry = Registry("thing", {"b": "x:y", "a": "x:y"})
    with pytest.raises(ConfigError, match=r"unknown thing 'c'; known: b, a"):
        registry.resolve("c")
