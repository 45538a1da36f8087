"""What a parsed answer consists of: pieces, in the order in which the model wrote them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(slots=True)
class Reasoning:
    """The model's thoughts before its answer."""

    text: str


@dataclass(slots=True)
class ToolCallBegin:
    """A call whose arguments follow. `index` counts the calls of one choice from 0."""

    index: int
    call_id: str
    name: str


@dataclass(slots=True)
class ToolCallArguments:
    """The next piece of a call's arguments; all pieces together are one JSON object."""

    index: int
    text: str


@dataclass(slots=True)
class ToolCallEnd:
    """The call is complete."""

    index: int


@dataclass(slots=True)
class ToolCallAbort:
    """The call is none after all, as its text is malformed or ends too early; a Content with that text follows."""

    index: int


Event = Content | Reasoning | ToolCallBegin | ToolCallArguments | ToolCallEnd | ToolCallAbort
