"""Jinja for chat templates: the environment that transformers defines, in a sandbox, with limits.

The sandbox keeps templates from Python's internals. It does not keep them from running for hours or filling the memory,
so every iteration and every call counts against a deadline, and texts that are built have a largest size.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.visitor import NodeTransformer

from pagedserve.errors import RequestError

MAX_SECONDS = 5.0
MAX_CHARS = 32 << 20
_TICKS_A_CHECK = 64
_MAX_INTEGER_BITS = 4096

__all__ = ["CompiledTemplate", "TemplateSyntaxError", "compile_template"]


class _LimitExceeded(TemplateError):
    """A template ran too long or built too much."""


class _Budget:
    """What one rendering may use. Checking the clock each time would cost more than the loop body."""

    def __init__(self, seconds: float):
        self._deadline = time.monotonic() + seconds
        self._seconds = seconds
        self._ticks = 0

    def tick(self) -> None:
        self._ticks += 1
        if self._ticks % _TICKS_A_CHECK == 0 and time.monotonic() > self._deadline:
            raise _LimitExceeded(f"rendering took more than {self._seconds:g} s")


_budget: ContextVar[_Budget] = ContextVar("template_budget")


class _BoundedIterable:
    """What a `for` loop iterates over, with a tick an item; keeps its length, so that `loop.last` needs no copy."""

    def __init__(self, items: Iterable[Any]):
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        budget = _budget.get()
        for item in self._items:
            budget.tick()
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]


# `pass_context` keeps Jinja from calling these while compiling, when no budget exists.
@jinja2.pass_context
def _bounded_loop(context: Any, items: Iterable[Any]) -> Any:
    return items if isinstance(items, jinja2.Undefined) else _BoundedIterable(items)


@jinja2.pass_context
def _bounded_text(context: Any, value: Any) -> Any:
    if isinstance(value, str | list | tuple) and len(value) > MAX_CHARS:
        raise _LimitExceeded(f"the template built a text of more than {MAX_CHARS} characters")
    return value


class _AddLimits(NodeTransformer):
    """Rewrites a parsed template: loops tick, sums and concatenations are measured."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _apply("_bounded_loop", node.iter)
        return node

    def _measure(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _apply("_bounded_text", node)

    visit_Add = visit_Concat = _measure


def _apply(name: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; for serving it is plain text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Any) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**"))

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_AddLimits().visit(source), *args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:  # context, callable, arguments; of the template's own names
        _budget.get().tick()
        return super().call(*args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > _MAX_INTEGER_BITS:
                raise _LimitExceeded("a power is too large")
        elif operator == "*":
            for text, count in ((left, right), (right, left)):
                repeats = isinstance(text, str | list | tuple) and isinstance(count, int)
                if repeats and len(text) * count > MAX_CHARS:
                    raise _LimitExceeded(f"a repetition has more than {MAX_CHARS} characters")
        return super().call_binop(context, operator, left, right)


class _Namespace(jinja2.utils.Namespace):
    """`namespace()` without names that begin with an underscore: they lead to Python's internals."""

    def __init__(*args: Any, **kwargs: Any):
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(fmt: str) -> str:
    return datetime.now().strftime(fmt)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which would change what the model reads.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    # The class itself would offer its attributes to the template.
    return dict(*args, **kwargs)


@lru_cache(maxsize=1)
def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters.update(tojson=_tojson, _bounded_loop=_bounded_loop, _bounded_text=_bounded_text)
    functions: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _dict,
        "namespace": _Namespace,
    }
    environment.globals.update(functions)
    return environment


class CompiledTemplate:
    """One template and what it expects.

    `content_format`: "string" (content is text), "either" (it tests for a list of parts), "parts" (it iterates over
    content without a test, so text would come out letter by letter). `wants_text_arguments`: it joins a call's
    arguments with other text as they are, so they must be JSON already.
    """

    def __init__(self, source: str):
        environment = _environment()
        tree = environment.parse(source)
        self._template = environment.from_string(source)
        # Not `find_undeclared_variables`: a template may give `tools` a default of its own.
        self.read_names = frozenset(name.name for name in tree.find_all(nodes.Name) if name.ctx == "load")
        self.content_format = _content_format(tree)
        self.knows_developer = "developer" in source
        self.wants_text_arguments = _wants_text_arguments(tree)

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text; RequestError carries the template's message where it raises, or names the limit."""
        token = _budget.set(_Budget(MAX_SECONDS))
        try:
            return self._join(self._template.generate(variables))
        except RequestError:
            raise
        except RecursionError as error:
            raise RequestError("chat template: too deeply nested", param="messages") from error
        except TemplateError as error:
            raise RequestError(f"chat template: {error.message or error}", param="messages") from error
        except Exception as error:  # a template can raise whatever its expressions raise
            raise RequestError(f"chat template: {type(error).__name__}: {error}", param="messages") from error
        finally:
            _budget.reset(token)

    @staticmethod
    def _join(pieces: Iterable[str]) -> str:
        budget, collected, size = _budget.get(), [], 0
        for piece in pieces:
            budget.tick()
            collected.append(piece)
            size += len(piece)
            if size > MAX_CHARS:
                raise _LimitExceeded(f"the prompt has more than {MAX_CHARS} characters")
        return "".join(collected)


@lru_cache(maxsize=16)
def compile_template(source: str) -> CompiledTemplate:
    """Parse and compile; raises Jinja's TemplateSyntaxError."""
    try:
        return CompiledTemplate(source)
    except RecursionError as error:
        raise TemplateSyntaxError("too deeply nested", 1) from error


def _content_format(tree: nodes.Template) -> str:
    names = {"content"}
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, names):
            names.add(assignment.target.name)
    if not any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For)):
        return "string"
    tests = {test.name for test in tree.find_all(nodes.Test)}
    return "either" if tests & {"string", "iterable", "sequence", "mapping"} else "parts"


def _wants_text_arguments(tree: nodes.Template) -> bool:
    """True where arguments are an operand of `+` or `~`, and nothing shows that they may be a mapping."""
    joined = [*tree.find_all(nodes.Add), *tree.find_all(nodes.Concat)]
    operands = [
        n for node in joined for n in (node.nodes if isinstance(node, nodes.Concat) else (node.left, node.right))
    ]
    if not any(_is_member(operand, "arguments") for operand in operands):
        return False
    readers = [*tree.find_all(nodes.Filter), *tree.find_all(nodes.Test)]
    calls = [call.node.node for call in tree.find_all(nodes.Call) if isinstance(call.node, nodes.Getattr)]
    loops = [loop.iter for loop in tree.find_all(nodes.For)]
    return not any(_is_member(node, "arguments") for node in (*(reader.node for reader in readers), *calls, *loops))


def _is_member(node: nodes.Node | None, name: str) -> bool:
    """True for `anything.name` and `anything['name']`."""
    if isinstance(node, nodes.Getattr):
        return node.attr == name
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == name


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    """True for `message.content`, `message['content']`, a variable set from it, or a filter of these."""
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Name):
        return node.name in names
    return _is_member(node, "content")
