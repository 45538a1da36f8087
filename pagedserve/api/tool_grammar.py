"""Grammars that force tool calls, each in the format that the model itself would write.

So a forced call reads like any other: the same parser takes it apart, and in the next turn's history the template
writes it as the model did. Formats whose arguments are JSON are `tags` (see `StructuredOutput`); the others are Lark.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedserve.sampling_params import StructuredOutput

Schema = Mapping[str, Any]
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ForcedCalls:
    """Calls that must come: of which functions (name -> schema of the arguments), and at most how many.

    `template` is the chat template, which tells variants of a format apart; `special` maps markers that are special
    tokens of the model to their ids.
    """

    tools: Mapping[str, Schema]
    max_calls: int | None
    template: str
    special: Mapping[str, int]

    def tags(
        self, begin: str, end: str, *, separator: str = "", prefix: str = "", suffix: str = "", max_calls: int = 0
    ) -> StructuredOutput:
        """Calls as `begin` (with NAME for the function's), JSON arguments, `end`."""
        tags = [
            {"begin": begin.replace("NAME", name), "schema": schema, "end": end} for name, schema in self.tools.items()
        ]
        limit = max_calls or self.max_calls
        return StructuredOutput.tags(tags, separator=separator, max=limit, prefix=prefix, suffix=suffix)


class LarkWriter:
    """Writes a Lark grammar in llguidance's dialect, rule by rule."""

    def __init__(self, special: Mapping[str, int]):
        self._special = special
        self._rules: list[str] = []
        self._num_names = 0

    def text(self, text: str) -> str:
        """An expression for a fixed text in which special tokens stand for themselves."""
        for marker, token_id in self._special.items():
            before, found, after = text.partition(marker)
            if found:
                parts = (self.text(before), f"<[{token_id}]>", self.text(after))
                return " ".join(part for part in parts if part)
        return json.dumps(text, ensure_ascii=False) if text else ""

    def rule(self, expression: str, attributes: str = "") -> str:
        """A new rule; its name."""
        name = f"r{self._num_names}"
        self._num_names += 1
        self._rules.append(f"{name}{attributes}: {expression}")
        return name

    def json(self, schema: Any, root: Schema) -> str:
        """A rule for JSON under `schema`, a part of `root`, whose definitions it may refer to."""
        if isinstance(schema, Mapping):
            definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
            schema = {**definitions, **schema}
        return self.rule(f"%json {json.dumps(schema, ensure_ascii=False)}")

    def free_text(self, end: str) -> str:
        """A rule for any text up to and including `end`."""
        if any(end.startswith(marker) for marker in self._special):
            return self.rule(f"/(?s:.*)/ {self.text(end)}")
        return self.rule("/(?s:.*)/", f"[suffix={json.dumps(end, ensure_ascii=False)}]")

    def one_of(self, *expressions: str) -> str:
        """A rule for any of the expressions."""
        return self.rule(" | ".join(expression or '""' for expression in expressions))

    def members(self, members: list[tuple[str, bool]], separator: str) -> str:
        """A rule for (expression, is required) in this order, what is not required left out at will."""
        # Two rules for each place: with and without a member before it, which decides on the separator.
        after: tuple[str, str] = ('""', '""')
        for expression, is_required in reversed(members):
            first, later = after
            with_later = f"{expression} {later}"
            alone, joined = with_later, f"{self.text(separator)} {with_later}"
            if is_required:
                after = (self.rule(alone), self.rule(joined))
            else:
                after = (self.one_of(alone, first), self.one_of(joined, later))
        return after[0]

    def finish(self, start: str) -> StructuredOutput:
        """The grammar, which begins with the expression `start`."""
        return StructuredOutput.grammar("\n".join([f"start: {start}", *self._rules, ""]))


def repeated(expression: str, separator: str, max_calls: int | None) -> str:
    """An expression for one or up to `max_calls` (None: any number) with a separator between."""
    if max_calls == 1:
        return expression
    times = "*" if max_calls is None else f"{{0,{max_calls - 1}}}"
    return f"{expression} ({separator} {expression}){times}"


def properties_of(schema: Schema) -> list[tuple[str, Any, bool]]:
    """Parameters of a function: (name, schema, is required), in the schema's order."""
    properties = schema.get("properties")
    required = schema.get("required")
    names = required if isinstance(required, list) else []
    if not isinstance(properties, Mapping):
        return []
    return [(name, properties[name], name in names) for name in properties]
