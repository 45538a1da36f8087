"""Chat templates: messages to the text of a prompt, as transformers' `apply_chat_template` renders them.

Templates are code from whoever published the model, fed with text from whoever calls. They run in Jinja's sandbox
(`template_sandbox`), with a limit on time and size, and a mistake in either is a RequestError. Rendering may take a
while: call `render` off the event loop.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pagedserve.engine.chat_messages import normalize_messages
from pagedserve.engine.template_sandbox import CompiledTemplate, TemplateSyntaxError, compile_template
from pagedserve.engine.tokenizer import Tokenizer, check_unicode
from pagedserve.errors import ConfigError, RequestError
from pagedserve.log import get_logger

logger = get_logger(__name__)

# Names that `render` or the caller decides, which `chat_template_kwargs` must not smuggle in.
RESERVED_KWARGS = frozenset(
    (
        *("messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("chat_template", "tokenize", "tokenizer_kwargs", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "sanitize_control_tokens"),
    )
)


class ChatTemplate:
    """The chat template(s) of one model.

    `templates` maps names to Jinja sources: "default", and maybe "tool_use", which is taken when tools are given.
    A model without any can still complete texts; `render` then answers with a RequestError.
    """

    def __init__(self, templates: Mapping[str, str], *, special_tokens: Mapping[str, str] | None = None):
        self._special_tokens = dict(special_tokens or {})
        self._sources = dict(templates)
        self._compiled: dict[str, CompiledTemplate] = {}
        self._broken: dict[str, str] = {}
        for name, source in templates.items():
            try:
                self._compiled[name] = compile_template(source)
            except TemplateSyntaxError as error:
                self._broken[name] = f"line {error.lineno}: {error.message}"

    @classmethod
    def load(cls, tokenizer: Tokenizer, override: str | None = None) -> ChatTemplate:
        """The model's own template, or `--chat-template`: a file, or the template itself.

        Raises ConfigError for an override that is neither or has a syntax error; a model's own broken template is a
        warning here, because texts can be completed without it, and a RequestError for who tries to chat.
        """
        if override is None:
            template = cls(tokenizer.chat_templates, special_tokens=tokenizer.special_tokens)
            for name, reason in template._broken.items():
                logger.warning("the model's chat template %r cannot be used: %s", name, reason)
            return template
        template = cls({"default": _read_override(override)}, special_tokens=tokenizer.special_tokens)
        if template._broken:
            raise ConfigError(f"--chat-template: syntax error in {template._broken['default']}")
        return template

    @property
    def exists(self) -> bool:
        """True where the model can chat."""
        return bool(self._compiled)

    @property
    def source(self) -> str:
        """The Jinja text, of all templates together: it shows in which formats the model writes."""
        return "\n".join(self._sources.values())

    @property
    def supports_tools(self) -> bool:
        """True where some template puts tools into the prompt."""
        return self.reads("tools")

    def reads(self, name: str) -> bool:
        """True where a variable of that name can make a difference to some template."""
        return any(name in compiled.read_names for compiled in self._compiled.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. It holds BOS if the template wrote it, so encode it with `add_special_tokens=False`.

        Raises RequestError for messages that are malformed or that the template refuses.
        """
        compiled = self._select(tools)
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message needs add_generation_prompt to be false: the prompt either goes on with the "
                "last message or begins a new one",
                param="continue_final_message",
            )
        kwargs = dict(chat_template_kwargs or {})
        if reserved := sorted(RESERVED_KWARGS.intersection(kwargs)):
            raise RequestError(
                f"chat_template_kwargs must not hold {', '.join(reserved)}", param="chat_template_kwargs"
            )
        conversation = normalize_messages(
            messages,
            content_format=compiled.content_format,
            knows_developer=compiled.knows_developer,
            text_arguments=compiled.wants_text_arguments,
        )
        marker = _mark_end(conversation) if continue_final_message else None
        variables = {
            **self._special_tokens,
            **kwargs,
            "messages": conversation,
            "tools": [dict(tool) for tool in tools] if tools else None,
            "documents": [dict(document) for document in documents] if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = compiled.render(variables)
        if marker is not None:
            text = _cut_at(text, marker)
        check_unicode(text, param="messages")
        return text

    def _select(self, tools: Sequence[Mapping[str, Any]] | None) -> CompiledTemplate:
        name = "tool_use" if tools and "tool_use" in {*self._compiled, *self._broken} else "default"
        if name in self._broken:
            raise RequestError(f"the model's chat template has a syntax error in {self._broken[name]}")
        if name not in self._compiled:
            known = ", ".join(self._compiled)
            raise RequestError(
                f"the model has several chat templates ({known}) but none named default; choose with --chat-template"
                if known
                else "the model has no chat template: use /v1/completions, or start the server with --chat-template"
            )
        compiled = self._compiled[name]
        if tools and "tools" not in compiled.read_names:
            raise RequestError("the model's chat template does not know tools", param="tools")
        return compiled


def _read_override(override: str) -> str:
    path = Path(override).expanduser()
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if "{" not in override:
            raise ConfigError(f"--chat-template {override}: {error}") from error
    if "{" not in override:
        raise ConfigError(f"--chat-template {override!r}: no such file, and not a Jinja template either")
    return override


def _mark_end(conversation: list[dict[str, Any]]) -> str:
    """Append a marker to the last message's text, to find in the rendered prompt where that text ends."""
    marker = f"<{secrets.token_hex(8)}> "
    last = conversation[-1]
    content = last.get("content")
    if isinstance(content, str) and content:
        last["content"] = content + marker
        return marker
    for part in reversed(content if isinstance(content, list) else ()):
        if part.get("type") == "text":
            part["text"] += marker
            return marker
    raise RequestError("continue_final_message: the last message has no text to go on with", param="messages")


def _cut_at(text: str, marker: str) -> str:
    end = text.rfind(marker.strip())
    if end < 0:
        raise RequestError("continue_final_message: the chat template leaves out the last message", param="messages")
    # A template that trims messages has taken the marker's trailing space, so it takes the text's too.
    return text[:end] if text.startswith(marker, end) else text[:end].rstrip()
