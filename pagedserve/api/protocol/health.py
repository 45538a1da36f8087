"""`/health`, `/ready`, `/version` and `/reset_prefix_cache`."""

from __future__ import annotations

import msgspec


class Status(msgspec.Struct):
    """`ok` or `ready`; what is not is an error."""

    status: str


class Version(msgspec.Struct):
    """Of this package."""

    version: str


class PrefixCacheReset(msgspec.Struct):
    """Whether all was forgotten."""

    reset: bool
