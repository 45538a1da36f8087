"""The fields by which clients ask for structured output, and what they mean to the engine.

Four generations of names: OpenAI's `response_format`, vLLM's `structured_outputs`, the `guided_*` fields that came
before it, and `json_object` with a schema, which llama.cpp and others take. One request may use one of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from pagedserve.errors import RequestError
from pagedserve.sampling_params import StructuredOutput

_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
# In a schema, keywords that hold schemas: by name, in a list, or one.
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_PARTS = ("items", "additionalProperties", "prefixItems", "anyOf", "oneOf", "allOf")


class StructuredOutputsOptions(BaseModel):
    """vLLM's `structured_outputs`: one of the first six, and how JSON is written."""

    model_config = ConfigDict(strict=True, extra="forbid")

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json", description="a JSON schema")
    json_object: bool | None = Field(None, description="true: any JSON object")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = Field(None, description="Lark (llguidance's dialect), or GBNF / EBNF with ::=")
    structural_tag: dict[str, Any] | str | None = None
    whitespace_pattern: str | None = Field(None, description="regex for the gaps between JSON tokens")
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = Field(None, description="accepted; nothing ever falls back")


class StructuredOutputFields(BaseModel):
    """What the text must look like; at most one of these."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    response_format: dict[str, Any] | None = Field(
        None, description="type: text, json_object, json_schema (json_schema: name, schema, strict) or structural_tag"
    )
    structured_outputs: StructuredOutputsOptions | None = None
    guided_json: dict[str, Any] | bool | str | None = Field(None, description="older name of structured_outputs.json")
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    def structured_output(self) -> StructuredOutput | None:
        """What is asked for, if anything. RequestError names the field that is wrong, or both of two."""
        asked = self._asked()
        if not asked:
            return None
        if len(asked) > 1:
            raise RequestError(f"{asked[0][0]} and {asked[1][0]} contradict each other: send one", param=asked[1][0])
        name, make = asked[0]
        try:
            return make()
        except RequestError as error:
            error.message = error.message.replace("structured_output", name)
            error.param = name if error.param == "structured_output" else error.param
            raise

    @property
    def structured_field(self) -> str | None:
        """The field that asks for structured output, for messages about it."""
        asked = self._asked()
        return asked[0][0] if asked else None

    def _asked(self) -> list[tuple[str, Callable[[], StructuredOutput]]]:
        found: list[tuple[str, Callable[[], StructuredOutput]]] = []
        if self.response_format is not None and self.response_format.get("type") != "text":
            found.append(("response_format", self._from_response_format))
        if self.structured_outputs is not None and self.structured_outputs.model_fields_set:
            found.append(("structured_outputs", self._from_options))
        found += [(name, self._from_guided(name)) for name in _GUIDED if getattr(self, name) is not None]
        return found

    def _from_response_format(self) -> StructuredOutput:
        wanted = self.response_format or {}
        kind = wanted.get("type")
        if kind == "json_object":
            _only("response_format", wanted, {"type", "schema"})
            schema = wanted.get("schema")
            return StructuredOutput.json_object() if schema is None else _schema("response_format.schema", schema)
        if kind == "structural_tag":
            return StructuredOutput.structural_tag({name: wanted[name] for name in wanted if name != "type"})
        if kind != "json_schema":
            raise RequestError(
                "response_format.type must be text, json_object, json_schema or structural_tag",
                param="response_format",
            )
        _only("response_format", wanted, {"type", "json_schema"})
        inner = wanted.get("json_schema")
        if not isinstance(inner, dict):
            raise RequestError("response_format.json_schema must be an object", param="response_format")
        # A schema one level too high would leave the text free.
        _only("response_format.json_schema", inner, {"name", "schema", "strict", "description"})
        if inner.get("schema") is None:
            raise RequestError("response_format.json_schema.schema is required", param="response_format")
        # Strict or not, what is generated fits the schema; OpenAI's rules for strict schemas are not needed for that.
        return _schema("response_format.json_schema.schema", inner["schema"])

    def _from_options(self) -> StructuredOutput:
        options = self.structured_outputs
        assert options is not None
        given = {
            "json": options.json_,
            "json_object": options.json_object or None,
            "regex": options.regex,
            "choice": options.choice,
            "grammar": options.grammar,
            "structural_tag": options.structural_tag,
        }
        kinds = [kind for kind, value in given.items() if value is not None]
        if len(kinds) != 1:
            which = " and ".join(kinds) if kinds else "none of them"
            raise RequestError(
                f"structured_outputs takes one of {', '.join(given)}; it has {which}", param="structured_outputs"
            )
        whitespace = "" if options.disable_any_whitespace else options.whitespace_pattern
        return _make(
            "structured_outputs",
            kinds[0],
            given[kinds[0]],
            whitespace,
            is_closed=bool(options.disable_additional_properties),
        )

    def _from_guided(self, name: str) -> Callable[[], StructuredOutput]:
        return lambda: _make(name, _GUIDED[name], getattr(self, name), self.guided_whitespace_pattern)


def _make(name: str, kind: str, value: Any, whitespace: str | None, *, is_closed: bool = False) -> StructuredOutput:
    match kind:
        case "json":
            return _schema(name, _closed(_parsed(name, value)) if is_closed else value, whitespace)
        case "json_object":
            return StructuredOutput.json_object(whitespace=whitespace)
        case "structural_tag":
            return StructuredOutput.structural_tag(value, whitespace=whitespace)
    return getattr(StructuredOutput, kind)(value)


def _schema(name: str, schema: Any, whitespace: str | None = None) -> StructuredOutput:
    if not isinstance(schema, dict | bool | str):
        raise RequestError(f"{name} must be a JSON schema", param=name.partition(".")[0])
    if isinstance(schema, str):
        _parsed(name, schema)
    return StructuredOutput.json_schema(schema, whitespace=whitespace)


def _parsed(name: str, schema: Any) -> Any:
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name} is not JSON: {error}", param=name.partition(".")[0]) from error


def _closed(schema: Any) -> Any:
    """`schema` with additionalProperties false in every object that does not say otherwise."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for key in _MAPS:
        if isinstance(closed.get(key), dict):
            closed[key] = {name: _closed(part) for name, part in closed[key].items()}
    for key in _PARTS:
        if key in closed:
            closed[key] = _closed(closed[key])
    if closed.get("type") == "object" or "properties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed


def _only(name: str, value: dict[str, Any], known: set[str]) -> None:
    unknown = sorted(value.keys() - known)
    if unknown:
        raise RequestError(
            f"{name}: unknown field {unknown[0]!r}; known are {', '.join(sorted(known))}", param="response_format"
        )
