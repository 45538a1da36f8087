"""Qwen 3, GLM 4.5, and most others: `<think>...</think>`, the first tag written by the template or by the model."""

from __future__ import annotations

from typing import ClassVar

from pagedserve.api.reasoning_parsers.base import DelimitedReasoning
from pagedserve.api.text_machine import Markers


class Qwen3Reasoning(DelimitedReasoning):
    """Without the first tag, in the prompt or in the answer, there are no thoughts."""

    OPEN: ClassVar[tuple[str, ...]] = ("<think>",)
    CLOSE: ClassVar[str] = "</think>"
    END: ClassVar[Markers] = Markers("</think>")
    SPECIAL: ClassVar[tuple[str, ...]] = ("<think>", "</think>")
