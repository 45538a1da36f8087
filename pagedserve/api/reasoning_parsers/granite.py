"""Granite 3.2 and later: thoughts and answer are announced by sentences, of which the model has two wordings."""

from __future__ import annotations

from typing import ClassVar

from pagedserve.api.reasoning_parsers.base import DelimitedReasoning
from pagedserve.api.text_machine import Markers


class GraniteReasoning(DelimitedReasoning):
    """`Here is my thought process: ... Here is my response: ...`."""

    OPEN: ClassVar[tuple[str, ...]] = ("Here is my thought process:", "Here's my thought process:")
    END: ClassVar[Markers] = Markers("Here is my response:", "Here's my response:")
