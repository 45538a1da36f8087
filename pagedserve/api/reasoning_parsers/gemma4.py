"""Gemma 4: `<|channel>thought`, a line break, the thoughts, `<channel|>`."""

from __future__ import annotations

from typing import ClassVar

from pagedserve.api.reasoning_parsers.base import DelimitedReasoning
from pagedserve.api.text_machine import Markers


class Gemma4Reasoning(DelimitedReasoning):
    """A template that has thinking turned off writes both markers itself."""

    OPEN: ClassVar[tuple[str, ...]] = ("<|channel>thought",)
    CLOSE: ClassVar[str] = "<channel|>"
    END: ClassVar[Markers] = Markers("<channel|>")
    SPECIAL: ClassVar[tuple[str, ...]] = ("<|channel>", "<channel|>")
