"""Grammars of tool calls, each in the format that the model itself would write.

So a forced call reads like any other: the same parser takes it apart, and in the next turn's history the template
writes it as the model did. A format describes one call and what stands around it (`CallGrammar`); from that come the
grammar of an answer that must be calls, and of one that may be text with calls in it whose arguments fit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedserve.sampling_params import StructuredOutput

Schema = Mapping[str, Any]
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_TEXT = "/(?s:.*)/"


@dataclass(frozen=True, slots=True)
class ToolChoices:
    """Functions that can be called (name -> schema of the arguments); the template tells variants of a format apart."""

    tools: Mapping[str, Schema]
    template: str


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """One call in Lark, and the texts around it: `before` all calls, `begin` of each, between two, `after` all."""

    call: str
    begin: str = ""
    separator: str = ""
    before: str = ""
    after: str = ""
    max_calls: int | None = None


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

    def json_call(self, begin: str, end: str, tools: Mapping[str, Schema]) -> str:
        """A rule for one call: `begin` (with NAME for the function's), the arguments as JSON, `end`."""
        return self.one_of(
            *(
                f"{self.text(begin.replace('NAME', name))} {self.json(schema, schema)} {self.text(end)}"
                for name, schema in tools.items()
            )
        )

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
            return self.rule(f"{_ANY_TEXT} {self.text(end)}")
        return self.rule(_ANY_TEXT, f"[suffix={json.dumps(end, ensure_ascii=False)}]")

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

    def forced(self, grammar: CallGrammar) -> StructuredOutput:
        """Calls and nothing else."""
        return self._finish(f"{self.text(grammar.before)} {self._calls(grammar)}")

    def amid_text(self, grammar: CallGrammar, marker: str, thoughts: tuple[str, str] | None) -> StructuredOutput:
        """Text in which `marker`, the beginning of calls, cannot be followed by anything else.

        Between `thoughts`, two markers at the beginning of the answer, it has no meaning.
        """
        opening = grammar.before or grammar.begin
        calls = self._calls(grammar) if grammar.before else grammar.call
        rest = f"{self.text(opening[len(marker) :])} {calls}"
        text = self.rule(_ANY_TEXT)
        if marker in self._special:
            segment = self.rule(f"{text} {self.text(marker)} {rest}")
        else:
            segment = self.rule(f"{self.rule(f'{_ANY_TEXT} {self.text(marker)}', '[lazy]')} {rest}")
        before = "" if thoughts is None else f"{self._between(*thoughts)}?"
        return self._finish(f"{before} {segment}* {text}")

    def _calls(self, grammar: CallGrammar) -> str:
        call = self.rule(f"{self.text(grammar.begin)} {grammar.call}")
        if grammar.max_calls != 1:
            call = f"{call} ({self.text(grammar.separator)} {call})*"
        return f"{call} {self.text(grammar.after)}"

    def _between(self, begin: str, end: str) -> str:
        if begin in self._special:
            return self.rule(f"{self.text(begin)} {_ANY_TEXT} {self.text(end)}")
        # One lexeme, which ends with the first of its ends.
        begin, end = (self.text(marker) for marker in (begin, end))
        return self.rule(rf"/\s*/ {begin} {_ANY_TEXT} {end}", "[lazy]")

    def _finish(self, start: str) -> StructuredOutput:
        return StructuredOutput.grammar("\n".join([f"start: {start}", *self._rules, ""]))


def properties_of(schema: Schema) -> list[tuple[str, Any, bool]]:
    """Parameters of a function: (name, schema, is required), in the schema's order."""
    properties = schema.get("properties")
    required = schema.get("required")
    names = required if isinstance(required, list) else []
    if not isinstance(properties, Mapping):
        return []
    return [(name, properties[name], name in names) for name in properties]
