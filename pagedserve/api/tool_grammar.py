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

from pagedserve.engine.grammars import json_rule
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

    def rule(self, expression: str, attributes: str = "", name: str = "r") -> str:
        """A new rule (a terminal where its name is in capitals); its name, with a number."""
        name = f"{name}{self._num_names}"
        self._num_names += 1
        self._rules.append(f"{name}{attributes}: {expression}")
        return name

    def json(self, schema: Any, root: Schema) -> str:
        """A rule for JSON under `schema`, a part of `root`, whose definitions it may refer to."""
        if isinstance(schema, Mapping):
            definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
            schema = {**definitions, **schema}
        return self.rule(json_rule(schema))

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
        calls = self.rule(f"{self.text(opening[len(marker) :])} {calls}")
        if thoughts is None:
            return self._finish(f"{self._segment(marker, calls, '')}* {self._lexeme('')}")
        # A lexer takes the first lexeme that ends. Thoughts that mention the marker must not be taken for text, so text
        # at the beginning is what does not begin as thoughts do.
        begin, end = thoughts
        if begin in self._special:
            thought = self.rule(f"{self.text(begin)} {_ANY_TEXT} {self.text(end)}")
            thinks = ""
        else:
            thought = self.rule(rf"/\s*/ {json.dumps(begin)} {_ANY_TEXT} {json.dumps(end)}", "[lazy]")
            thinks = rf" & ~(/\s*/ {json.dumps(begin)} {_ANY_TEXT})"
        after = f"{self._segment(marker, calls, '')}* {self._lexeme('')}"
        return self._finish(
            f"{thought} {after} | {self._segment(marker, calls, thinks)} {after} | {self._lexeme(thinks)}"
        )

    def _segment(self, marker: str, calls: str, condition: str) -> str:
        """Text up to the marker, and the calls behind it."""
        if marker in self._special:
            return self.rule(f"{self._lexeme(condition)} {self.text(marker)} {calls}")
        lexeme = self._lexeme(condition, f"{_ANY_TEXT} {self.text(marker)}")
        return self.rule(f"{self.rule(lexeme, '[lazy]')} {calls}")

    def _lexeme(self, condition: str, text: str = _ANY_TEXT) -> str:
        """A terminal for a text under a condition, which only terminals can have."""
        return self.rule(f"({text}){condition}", name="TEXT")

    def _calls(self, grammar: CallGrammar) -> str:
        call = self.rule(f"{self.text(grammar.begin)} {grammar.call}")
        if grammar.max_calls != 1:
            call = f"{call} ({self.text(grammar.separator)} {call})*"
        return f"{call} {self.text(grammar.after)}"

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
