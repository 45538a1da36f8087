"""Reading config.json: typed fields with errors that name them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pagedserve.errors import ConfigError, ModelLoadError


class Fields:
    """Checked access to the fields of one config.json."""

    def __init__(self, config: Mapping[str, Any]):
        self._config = config

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number above 0; absent or null means the default."""
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise _wrong(name, value, "a whole number above 0")
        return value

    def optional_integer(self, name: str) -> int | None:
        return None if self._config.get(name) is None else self.integer(name)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise _wrong(name, value, "a number")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return None if self._config.get(name) is None else self.number(name)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise _wrong(name, value, "true or false")
        return value

    def string(self, name: str, default: str) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise _wrong(name, value, "a string")
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self._config.get(name)
        return default if value is None else value


def resolve_max_model_len(derived: int, requested: int | None) -> int:
    """The longest sequence to serve: what was asked for, else what the model was made for.

    ConfigError where more is asked for than the model's positions reach: beyond them its output is noise.
    """
    if requested is None:
        return derived
    if requested > derived:
        raise ConfigError(f"--max-model-len {requested}: this model reaches {derived} tokens; use that or less")
    return requested


def _wrong(name: str, value: Any, wanted: str) -> ModelLoadError:
    return ModelLoadError(f"config.json: {name} is {'missing' if value is None else repr(value)[:80]}, not {wanted}")
