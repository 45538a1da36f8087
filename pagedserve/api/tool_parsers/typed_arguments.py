"""Arguments that a format writes as plain text: what they are in JSON, by the schema of their function."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any, ClassVar

from pagedserve.api.text_machine import Markers, Reading
from pagedserve.api.tool_grammar import LarkWriter, Schema, properties_of
from pagedserve.api.tool_parsers.base import MarkedParser

_KEYWORDS = {"True": True, "False": False, "None": None}


def types_of(schema: Any) -> frozenset[str]:
    """The JSON types that a schema allows, as far as it says so; empty where it does not."""
    if not isinstance(schema, Mapping):
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, list):
        return frozenset(entry for entry in kind if isinstance(entry, str))
    for name in ("anyOf", "oneOf"):
        arms = schema.get(name)
        if isinstance(arms, list):
            found = [types_of(arm) for arm in arms]
            return frozenset().union(*found) if all(found) else frozenset()
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return frozenset(("string",)) if values and all(isinstance(value, str) for value in values) else frozenset()


def schema_of(function: Mapping[str, Any], parameter: str) -> Any:
    """The schema of one parameter; None where the function does not describe it."""
    properties = function.get("properties")
    return properties.get(parameter) if isinstance(properties, Mapping) else None


def is_text(schema: Any) -> bool:
    """True where only a string can be meant, so that even `5` is one."""
    return types_of(schema) == {"string"}


def json_of(text: str, schema: Any) -> str:
    """The text as JSON: as what it reads, where the schema allows that; as a string otherwise."""
    stripped = text.strip()
    types = types_of(schema)
    try:
        value = _KEYWORDS[stripped] if stripped in _KEYWORDS else json.loads(stripped)
    except (ValueError, RecursionError):
        value = _python_value(stripped) if types & {"array", "object"} else text
    if "string" in types and types.isdisjoint(_types_of_value(value)):
        value = text
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def _python_value(text: str) -> Any:
    """Models write lists with single quotes, too."""
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text
    return value


def _types_of_value(value: Any) -> tuple[str, ...]:
    if value is None:
        return ("null",)
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, int):
        return ("integer", "number")
    if isinstance(value, float):
        return ("number",)
    return ({list: "array", dict: "object"}.get(type(value), "string"),)


class TaggedArgumentsParser(MarkedParser):
    """Calls whose arguments stand between tags, one after the other; strings come out as they come in."""

    # What may stand between a value and its tags without being part of it.
    PADDING: ClassVar[str] = ""

    def add_parameter(self, name: str, key: str, end: Markers, *, is_first: bool) -> Reading[None]:
        """One value, up to its closing tag."""
        schema = schema_of(self.tools[name], key)
        self.add_arguments(("{" if is_first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        if self.PADDING:
            yield from self.found(self.PADDING)
        if not is_text(schema):
            parts: list[str] = []
            yield from self.copy_until(end, parts.append)
            self.add_arguments(json_of("".join(parts).removesuffix(self.PADDING), schema))
            return
        self.add_arguments('"')
        held = ""

        def add(text: str) -> None:
            nonlocal held
            text = held + text
            held = self.PADDING if self.PADDING and text.endswith(self.PADDING) else ""
            self.add_arguments(json.dumps(text[: len(text) - len(held)], ensure_ascii=False)[1:-1])

        yield from self.copy_until(end, add)
        self.add_arguments('"')

    def close_arguments(self, *, is_empty: bool) -> None:
        """The end of the object, and of the call."""
        self.add_arguments("{}" if is_empty else "}")
        self.end_call()


def text_choices(schema: Any) -> list[str] | None:
    """The strings that a text parameter may be; None where it is free."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return values if isinstance(values, list) and all(isinstance(value, str) for value in values) else None


def tagged_parameters(lark: LarkWriter, schema: Schema, begin: str, end: str) -> str:
    """A rule for all parameters: `begin` (with KEY for the parameter's name), the value, `end`."""
    members = []
    for key, value_schema, is_required in properties_of(schema):
        if not is_text(value_schema):
            value = f"{lark.json(value_schema, schema)} {lark.text(end)}"
        elif (choices := text_choices(value_schema)) is not None:
            value = f"{lark.one_of(*map(lark.text, choices))} {lark.text(end)}"
        else:
            value = lark.free_text(end)
        members.append((f"{lark.text(begin.replace('KEY', key))} {value}", is_required))
    return lark.members(members, "")
