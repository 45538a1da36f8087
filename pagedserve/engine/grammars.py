"""What a StructuredOutput asks for, as a grammar of llguidance; and the checks that need no compiler.

Everything becomes Lark text in llguidance's dialect, in which JSON schemas stand as `%json {...}` and single tokens as
`<[id]>`. Raises RequestError with the reason for what cannot be expressed: nothing is left out silently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from pagedserve.errors import RequestError
from pagedserve.sampling_params import StructuredOutput

PARAM = "structured_output"
# Deeper schemas recurse deeply in whoever reads them.
MAX_NESTING = 64
# The converter of GBNF is Python, which would hold up the engine's loop.
MAX_GBNF_LENGTH = 32_768
# Between JSON tokens: nothing, a space, or a newline with some indentation. Any whitespace at all would let a model
# that likes newlines go on until its tokens are used up.
WHITESPACE = r"(\x20|\n\x20{0,16})?"

_HEADER = "%llguidance {}\n"
_JSON_IN_LARK = re.compile(r"%json\s+(?=\{)")
_ANYTHING = r"/(.|\n)*/"
# What marks a dict as a schema; the keywords of drafts 4 to 2020-12 with which an empty-looking schema could begin.
_SCHEMA_KEYWORDS = frozenset(
    {"type", "properties", "required", "additionalProperties", "patternProperties", "enum", "const", "items"}
    | {"anyOf", "oneOf", "allOf", "not", "if", "$ref", "$defs", "definitions", "pattern", "format", "prefixItems"}
    | {"minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    | {"minItems", "maxItems", "uniqueItems", "minProperties", "maxProperties", "propertyNames", "contains"}
    | {"dependentRequired", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems", "$schema", "$id"}
    | {"title", "description", "default", "examples", "$comment", "$anchor", "dependencies", "contentEncoding"}
)


def to_lark(output: StructuredOutput, special_tokens: Mapping[str, int]) -> str:
    """The grammar of `output`; `special_tokens` are those that literal text may name, with their ids."""
    make = _KINDS[output.kind]
    text = _Literals(special_tokens)
    body, rules = make(output, text)
    parts = [part for part in (text.quote(output.prefix), body, text.quote(output.suffix)) if part]
    if not parts:
        raise _refusal("the grammar allows nothing but an empty text")
    start = " ".join(parts)
    if start == "@body" and output.thoughts is None and output.alternative is None:
        return rules
    main = "" if body == "@body" else rules
    if output.alternative is not None:
        start = f"({start} | alternative)"
        main += _with_json_rules(output.alternative.replace("start:", "alternative:", 1), output.whitespace) + "\n"
    if output.thoughts is not None:
        start = f"thoughts? {start}"
        main += _thoughts(*output.thoughts, text)
    main = f"{_HEADER}start: {start}\n{main}"
    if body != "@body":
        return main
    grammars = [{"name": "main", "lark_grammar": main}, {"name": "body", "lark_grammar": rules}]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _thoughts(begin: str, end: str, text: _Literals) -> str:
    opening, closing = text.quote(begin), text.quote(end)
    if opening.startswith("<["):
        return f"thoughts: {opening} THOUGHTS {closing} GAP\nTHOUGHTS: {_ANYTHING}\nGAP: /\\s{{0,4}}/\n"
    # One lexeme, which ends with the first of its ends.
    return f"thoughts: thinking GAP\nthinking[lazy]: {opening} {_ANYTHING} {closing}\nGAP: /\\s{{0,4}}/\n"


class _Literals:
    """Text as it stands in Lark: special tokens by their ids, the rest in quotes."""

    def __init__(self, special_tokens: Mapping[str, int]):
        self._ids = special_tokens
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def quote(self, text: str) -> str:
        """Lark for exactly this text; empty for the empty text."""
        parts: list[str] = []
        start = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            parts += [json.dumps(text[start : match.start()], ensure_ascii=False), f"<[{self._ids[match[0]]}]>"]
            start = match.end()
        parts.append(json.dumps(text[start:], ensure_ascii=False))
        return " ".join(part for part in parts if part != '""')


def json_rule(schema: Any, whitespace: str | None = None) -> str:
    """`schema` as a Lark expression, with the bounded whitespace that all JSON here has."""
    if not isinstance(schema, dict | bool):
        raise _refusal(f"a JSON schema is an object, not {type(schema).__name__}")
    if schema is False:
        raise _refusal("the schema false allows nothing")
    schema = {} if schema is True else schema
    if schema and not _SCHEMA_KEYWORDS & schema.keys():
        names = ", ".join(sorted(map(str, schema))[:5])
        raise _refusal(f"this is no JSON schema: none of its keys ({names}) is a keyword")
    _check_nesting(schema)
    pattern = WHITESPACE if whitespace is None else whitespace
    options = {"whitespace_flexible": bool(pattern), "coerce_one_of": False, "lenient": False}
    if pattern:
        options["whitespace_pattern"] = pattern
    # The options come last: what a client wrote there would switch checks off.
    return "%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def _json_object(output: StructuredOutput, text: _Literals) -> tuple[str, str]:
    return "json", f"json: {json_rule({'type': 'object'}, output.whitespace)}\n"


def _json_schema(output: StructuredOutput, text: _Literals) -> tuple[str, str]:
    return "json", f"json: {json_rule(_parse(output.value), output.whitespace)}\n"


def _regex(output: StructuredOutput, text: _Literals) -> tuple[str, str]:
    from llguidance import regex_to_lark  # no start waits for it

    return "REGEX", f"REGEX: /{regex_to_lark(output.value)}/\n"


def _choice(output: StructuredOutput, text: _Literals) -> tuple[str, str]:
    choices = _parse(output.value)
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise _refusal("choice must be a list of strings")
    quoted = dict.fromkeys(json.dumps(choice, ensure_ascii=False) for choice in choices)
    if set(quoted) <= {'""'}:
        raise _refusal("choice must hold a string that is not empty")
    return "choice", f"choice: {' | '.join(quoted)}\n"


def _grammar(output: StructuredOutput, text: _Literals) -> tuple[str, str]:
    if "::=" not in output.value:
        return "@body", _with_json_rules(output.value, output.whitespace)
    if len(output.value) > MAX_GBNF_LENGTH:
        raise _refusal(f"a GBNF grammar may have at most {MAX_GBNF_LENGTH} characters")
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return "@body", gbnf_to_lark(output.value)
    except RecursionError as error:
        raise _refusal("the grammar is nested too deeply") from error
    except Exception as error:  # the converter raises what its parser meets
        raise _refusal(f"the GBNF grammar cannot be read: {error}") from error


def _with_json_rules(lark: str, whitespace: str | None) -> str:
    """Lark whose schemas (`%json {...}`) have the whitespace and the checks of all JSON here."""
    parts: list[str] = []
    start = 0
    decoder = json.JSONDecoder()
    for match in _JSON_IN_LARK.finditer(lark):
        if match.start() < start:
            continue
        try:
            schema, end = decoder.raw_decode(lark, match.end())
        except (ValueError, RecursionError):
            continue  # the compiler says what is wrong
        parts += [lark[start : match.start()], json_rule(schema, whitespace)]
        start = end
    return "".join([*parts, lark[start:]])


def _structural_tag(output: StructuredOutput, text: _Literals) -> tuple[str, str]:
    """Free text up to a trigger, then one of the structures that begin with it, and so on."""
    tag = _parse(output.value)
    if not isinstance(tag, dict) or not isinstance(tag.get("triggers"), list):
        raise _refusal('a structural_tag is an object with "structures" (begin, schema, end) and "triggers"')
    triggers = tag["triggers"]
    if not triggers or not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise _refusal("triggers must be a list of strings that are not empty")
    structures = _tags(tag.get("structures"), "structures")
    rules = [f"tail: TEXT\nTEXT: {_ANYTHING}"]
    used: set[int] = set()
    names: list[str] = []
    for number, trigger in enumerate(dict.fromkeys(triggers)):
        alternatives = []
        for index, structure in enumerate(structures):
            if structure["begin"].startswith(trigger) and index not in used:
                used.add(index)
                rest = structure["begin"][len(trigger) :]
                alternatives.append(_tag(structure, rest, output, text))
        if not alternatives:
            raise _refusal(f"no structure begins with the trigger {trigger!r}")
        quoted = text.quote(trigger)
        name = f"tag_{number}"
        names.append(name)
        if quoted.startswith("<["):
            rules.append(f"{name}: TEXT {quoted} ({' | '.join(alternatives)})")
        else:
            rules.append(f"{name}_trigger[lazy]: TEXT {quoted}")
            rules.append(f"{name}: {name}_trigger ({' | '.join(alternatives)})")
    if len(used) < len(structures):
        index = next(i for i in range(len(structures)) if i not in used)
        raise _refusal(f"the structure {structures[index]['begin']!r} begins with none of the triggers")
    return f"({' | '.join(names)})* tail", "\n".join(rules) + "\n"


def _forced_tags(output: StructuredOutput, text: _Literals) -> tuple[str, str]:
    """One tag after the other, and nothing else."""
    value = _parse(output.value)
    if not isinstance(value, dict):
        raise _refusal('tags are an object with "tags", "separator" and "max"')
    tags = _tags(value.get("tags"), "tags")
    separator, most = value.get("separator", ""), value.get("max")
    if not isinstance(separator, str):
        raise _refusal("separator must be a string")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise _refusal("max must be an integer of at least 1, or null")
    alternatives = [_tag(tag, tag["begin"], output, text) for tag in tags]
    repeated = f"({text.quote(separator)} tag)" if separator else "tag"
    more = {1: ""}.get(most or 0, f"{repeated}*" if most is None else f"{repeated}{{0,{most - 1}}}")
    return f"tag {more}", f"tag: {' | '.join(alternatives)}\n"


def _tag(tag: dict[str, Any], begin: str, output: StructuredOutput, text: _Literals) -> str:
    parts = (text.quote(begin), json_rule(tag["schema"], output.whitespace), text.quote(tag["end"]))
    return "(" + " ".join(part for part in parts if part) + ")"


def _tags(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value or not all(isinstance(tag, dict) for tag in value):
        raise _refusal(f"{name} must be a list of objects with begin, schema and end")
    tags = [{"schema": {}, "end": "", **tag} for tag in value]
    for tag in tags:
        if not isinstance(tag.get("begin"), str) or not isinstance(tag["end"], str):
            raise _refusal(f"begin and end of {name} must be strings")
        unknown = sorted(tag.keys() - {"begin", "schema", "end"})
        if unknown:
            raise _refusal(f"{name} have begin, schema and end; {unknown[0]!r} is not known")
    return tags


def _parse(text: str) -> Any:
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise _refusal(f"the schema is nested deeper than {MAX_NESTING} levels") from error
    except ValueError as error:
        raise _refusal(f"the schema is not JSON: {error}") from error
    _check_nesting(value)
    return value


def _check_nesting(value: Any) -> None:
    level = [value]
    for _ in range(MAX_NESTING + 1):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        if not inner:
            return
        level = inner
    raise _refusal(f"the schema is nested deeper than {MAX_NESTING} levels")


def _refusal(reason: str) -> RequestError:
    return RequestError(reason, param=PARAM)


def _text(output: StructuredOutput, text: _Literals) -> tuple[str, str]:
    return "TEXT", f"TEXT: {_ANYTHING}\n"


_KINDS: dict[str, Callable[[StructuredOutput, _Literals], tuple[str, str]]] = {
    "json_object": _json_object,
    "json_schema": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
    "tags": _forced_tags,
    "text": _text,
}
