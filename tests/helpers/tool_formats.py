"""Tool calls and thoughts as models write them: for every format a template, a way to write calls, and odd texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Call = tuple[str, dict[str, Any]]

# Every chat template here is ChatML that shows tools; what tells the format is a comment of the template.
_TEMPLATE = (
    "{{# {signs} #}}{{%- if tools %}}<|im_start|>system\n{{{{ tools | tojson }}}}<|im_end|>\n{{% endif %}}"
    "{{%- for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{{{ m.reasoning_content }}}}{{{{ m.content }}}}"
    "{{%- for c in m.tool_calls or [] %}}[{{{{ c.function.name }}}}({{{{ c.function.arguments | tojson }}}})]"
    "{{%- endfor %}}<|im_end|>\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|im_start|>assistant\n{opening}{{% endif %}}"
)


def template_with(signs: str, opening: str = "") -> str:
    """A ChatML template with these words in it, which opens every answer with `opening`."""
    return _TEMPLATE.format(signs=signs, opening=opening)


def json_object(name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    """`{"name": ..., "arguments": ...}`."""
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{json_object(*call)}\n</tool_call>" for call in calls)


def llama3_json(calls: Sequence[Call]) -> str:
    return "; ".join(json_object(*call, key="parameters") for call in calls)


def mistral(calls: Sequence[Call]) -> str:
    return f"[TOOL_CALLS][{', '.join(json_object(*call) for call in calls)}]"


def mistral_v11(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def granite(calls: Sequence[Call]) -> str:
    return f"<|tool_call|>[{', '.join(json_object(*call) for call in calls)}]"


def deepseek_v3(calls: Sequence[Call]) -> str:
    texts = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(texts) + "<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Sequence[Call]) -> str:
    texts = (
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments, ensure_ascii=False)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return "<｜tool▁calls▁begin｜>" + "".join(texts) + "<｜tool▁calls▁end｜>"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def qwen3_coder(calls: Sequence[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        body = "".join(f"<parameter={k}>\n{_plain(v)}\n</parameter>\n" for k, v in arguments.items())
        return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def glm45(calls: Sequence[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        pairs = (f"<arg_key>{k}</arg_key>\n<arg_value>{_plain(v)}</arg_value>\n" for k, v in arguments.items())
        return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def pythonic_call(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def pythonic(calls: Sequence[Call]) -> str:
    return f"[{', '.join(pythonic_call(*call) for call in calls)}]"


def gemma3(calls: Sequence[Call]) -> str:
    return "```tool_code\n" + "\n".join(pythonic_call(*call) for call in calls) + "\n```"


def _gemma_value(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, list):
        return f"[{','.join(_gemma_value(entry, quote) for entry in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_gemma_value(entry, quote)}' for key, entry in value.items())}}}"
    return json.dumps(value)


def functiongemma(calls: Sequence[Call]) -> str:
    return "".join(
        f"<start_function_call>call:{name}{_gemma_value(arguments, '<escape>')}<end_function_call>"
        for name, arguments in calls
    )


def gemma4(calls: Sequence[Call]) -> str:
    quote = '<|"|>'
    return "".join(f"<|tool_call>call:{name}{_gemma_value(arguments, quote)}<tool_call|>" for name, arguments in calls)


def harmony(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
        for name, arguments in calls
    )


@dataclass(frozen=True)
class Format:
    """One format: how it writes calls, the parser's name, the signs in a template, and what it can express.

    `leads`: calls may only stand at the beginning. `free_strings`: strings may hold anything, its own markup too.
    """

    write: Any
    parser: str
    signs: str
    leads: bool = False
    free_strings: bool = True


FORMATS = {
    "hermes": Format(hermes, "hermes", "<tool_call>"),
    "llama3_json": Format(llama3_json, "llama3_json", '"parameters" <|eot_id|>', leads=True),
    "mistral": Format(mistral, "mistral", "[TOOL_CALLS]"),
    "mistral_v11": Format(mistral_v11, "mistral", "[TOOL_CALLS] [ARGS]"),
    "granite": Format(granite, "granite", "<|tool_call|> <|start_of_role|>"),
    "deepseek_v3": Format(deepseek_v3, "deepseek_v3", "<｜tool▁calls▁begin｜> ```json"),
    "deepseek_v31": Format(deepseek_v31, "deepseek_v31", "<｜tool▁calls▁begin｜>"),
    "qwen3_coder": Format(qwen3_coder, "qwen3_coder", "<tool_call> <function= <parameter=", free_strings=False),
    "glm45": Format(glm45, "glm45", "<tool_call> <arg_key>", free_strings=False),
    "pythonic": Format(pythonic, "pythonic", "<|python_start|>", leads=True),
    "gemma3": Format(gemma3, "gemma3", "```tool_code"),
    "functiongemma": Format(functiongemma, "functiongemma", "<start_function_call>", free_strings=False),
    "gemma4": Format(gemma4, "gemma4", "<|tool_call>", free_strings=False),
    "openai": Format(harmony, "openai", "<|channel|>analysis <|call|>"),
}

# Beginnings, middles and ends of markers of all formats: what texts are made of that look like calls.
SCRAPS = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<tool",
        '{"name": "f"',
        '{"name": "f", "arguments": {',
        '"}',
        "{}",
        "[]",
        "[",
        "]",
    ),
    *(
        "[TOOL_CALLS]",
        "[ARGS]",
        "[{",
        "<|tool_call|>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
    ),
    *("<function=f>", "<parameter=a>", "</parameter>", "</function>", "<arg_key>", "</arg_key>", "<arg_value>"),
    *("[f(", "f(a=1)", ")]", "a='", "```tool_code", "```", "<start_function_call>", "call:f{", "a:", "<escape>"),
    *("<|channel|>", "analysis", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "commentary to=functions.f "),
    *("<think>", "</think>", "[THINK]", "[/THINK]", "Here is my thought process:", "Here is my response:", "Here"),
    *("\\", '"', "'", ",", ":", "}", "{", ";", " ", "\n", "\t", "1", "-", "true", "null", "é", "🦜", "汉", "\x00", "x"),
)
