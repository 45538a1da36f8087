"""Magistral: `[THINK]...[/THINK]`."""

from __future__ import annotations

from typing import ClassVar

from pagedserve.api.reasoning_parsers.base import DelimitedReasoning
from pagedserve.api.text_machine import Markers


class MistralReasoning(DelimitedReasoning):
    """Both markers are special tokens of the model."""

    OPEN: ClassVar[tuple[str, ...]] = ("[THINK]",)
    CLOSE: ClassVar[str] = "[/THINK]"
    END: ClassVar[Markers] = Markers("[/THINK]")
    SPECIAL: ClassVar[tuple[str, ...]] = ("[THINK]", "[/THINK]")
