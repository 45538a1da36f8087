"""Tools in a request: which functions there are, which may or must be called. Checked here for every chat route."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedserve.api.tool_grammar import NO_ARGUMENTS
from pagedserve.errors import RequestError

MAX_TOOLS = 512
MAX_SCHEMA_DEPTH = 64
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NAME_RULE = "1 to 64 letters, digits, underscores, dots and hyphens"
MODES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says about tools.

    `mode` is none, auto, required, or named. `shown` is what the template is given; `schemas` maps the names of
    functions that may be called to the schemas of their arguments.
    """

    mode: str = "none"
    shown: tuple[Mapping[str, Any], ...] = ()
    schemas: Mapping[str, Mapping[str, Any]] | None = None
    strict_names: frozenset[str] = frozenset()
    is_parallel: bool = True

    @property
    def is_forced(self) -> bool:
        """True where the answer must be a call."""
        return self.mode in ("required", "named")

    @property
    def max_calls(self) -> int | None:
        """Calls that an answer may have; None for any number."""
        return 1 if self.mode == "named" or not self.is_parallel else None


NO_TOOLS = ToolUse()


def read_tools(tools: object, tool_choice: object, parallel_tool_calls: bool | None) -> ToolUse:
    """Check the three fields; RequestError names the entry at fault. An empty list of tools is as good as none."""
    functions = _functions(tools) if tools else {}
    mode, names = _choice(tool_choice, functions)
    if not functions or mode == "none":
        return NO_TOOLS
    assert isinstance(tools, list)
    called = {name: _schema(function) for name, function in functions.items() if names is None or name in names}
    strict = frozenset(name for name in called if functions[name].get("strict") is True)
    return ToolUse(mode, tuple(tools), called, strict, parallel_tool_calls is not False)


def _functions(tools: object) -> dict[str, Mapping[str, Any]]:
    if not isinstance(tools, list):
        raise _error("tools must be a list")
    if len(tools) > MAX_TOOLS:
        raise _error(f"tools may hold at most {MAX_TOOLS} tools, not {len(tools)}")
    functions: dict[str, Mapping[str, Any]] = {}
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if not isinstance(tool, dict):
            raise _error(f'{where} must be an object such as {{"type": "function", "function": {{"name": "f"}}}}')
        if tool.get("type") != "function":
            raise _error(f"{where}.type is {_shown(tool.get('type'))}; only functions can be called here")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise _error(f"{where}.function must be an object with a name")
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise _error(f"{where}.function.name is {_shown(name)}; a name is {_NAME_RULE}")
        if name in functions:
            raise _error(f"{where}.function.name {name} is taken by an earlier tool")
        _check_function(function, f"{where}.function")
        functions[name] = function
    return functions


def _check_function(function: Mapping[str, Any], where: str) -> None:
    for key, kind, wanted in (("description", str, "text"), ("strict", bool, "true or false")):
        value = function.get(key)
        if value is not None and not isinstance(value, kind):
            raise _error(f"{where}.{key} must be {wanted}")
    parameters = function.get("parameters")
    if parameters is None:
        return
    if not isinstance(parameters, dict):
        raise _error(f"{where}.parameters must be a JSON schema of an object")
    if parameters.get("type", "object") != "object":
        raise _error(f"{where}.parameters.type must be object, for arguments have names")
    for key, kind in (("properties", dict), ("required", list)):
        if key in parameters and not isinstance(parameters[key], kind):
            raise _error(f"{where}.parameters.{key} must be {'an object' if kind is dict else 'a list'}")
    if _is_deeper(parameters, MAX_SCHEMA_DEPTH):
        raise _error(f"{where}.parameters is nested more than {MAX_SCHEMA_DEPTH} levels deep")


def _schema(function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = function.get("parameters")
    if not parameters:
        return NO_ARGUMENTS
    schema = {"type": "object", **parameters}
    if schema.get("properties"):
        # A schema that says nothing about other properties allows all; functions do not take them.
        schema.setdefault("additionalProperties", False)
    return schema


def _choice(choice: object, functions: Mapping[str, object]) -> tuple[str, frozenset[str] | None]:
    """The mode, and the names that may be called (None: all)."""
    if choice is None:
        return ("auto" if functions else "none"), None
    if isinstance(choice, str):
        if choice not in MODES:
            raise _error(f"tool_choice is {_shown(choice)}; known: {', '.join(MODES)}, or a function", "tool_choice")
        if choice == "required" and not functions:
            raise _error("tool_choice is required, but there are no tools", "tool_choice")
        return choice, None
    if not isinstance(choice, dict):
        raise _error(f"tool_choice must be one of {', '.join(MODES)}, or an object", "tool_choice")
    if choice.get("type") == "allowed_tools":
        return _allowed(choice, functions)
    return "named", frozenset((_named(choice, functions, "tool_choice"),))


def _allowed(choice: Mapping[str, Any], functions: Mapping[str, object]) -> tuple[str, frozenset[str]]:
    allowed = choice.get("allowed_tools", choice)
    entries = allowed.get("tools") if isinstance(allowed, dict) else None
    if not isinstance(entries, list) or not entries or allowed.get("mode") not in ("auto", "required"):
        message = "tool_choice.allowed_tools must be an object with mode (auto or required) and tools"
        raise _error(message, "tool_choice")
    names = (_named(entry, functions, f"tool_choice.allowed_tools.tools[{i}]") for i, entry in enumerate(entries))
    return allowed["mode"], frozenset(names)


def _named(entry: object, functions: Mapping[str, object], where: str) -> str:
    function = entry.get("function") if isinstance(entry, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(entry, dict) or entry.get("type", "function") != "function" or not isinstance(name, str):
        message = f'{where} must be an object such as {{"type": "function", "function": {{"name": "f"}}}}'
        raise _error(message, "tool_choice")
    if name not in functions:
        known = ", ".join(list(functions)[:20]) or "none"
        raise _error(f"{where} names {_shown(name)}, which is not among the tools ({known})", "tool_choice")
    return name


def _is_deeper(value: object, limit: int) -> bool:
    level: list[object] = [value]
    for _ in range(limit):
        level = [
            child
            for entry in level
            for child in (entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ())
        ]
        if not level:
            return False
    return any(isinstance(entry, dict | list) for entry in level)


def _error(message: str, param: str = "tools") -> RequestError:
    return RequestError(message, param=param)


def _shown(value: object) -> str:
    return "missing" if value is None else ascii(value)[:80]
