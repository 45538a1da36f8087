"""Chat templates of the kinds that models have, conversations for them, and transformers' rendering as the oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagedserve.engine.chat_template import ChatTemplate
from tests.helpers.tokenizers import byte_level_backend

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = (
    "{{ bos_token }}{%- if tools %}<tools>{% for t in tools %}{{ t | tojson }}\n{% endfor %}</tools>{% endif %}\n"
    "{%- for m in messages %}\n"
    "    {%- if m.tool_calls %}{% for c in m.tool_calls %}[{{ c.function.name }}({{ c.function.arguments | tojson }})]"
    "{% endfor %}\n"
    "    {%- elif m.role == 'tool' %}<result>{{ m.content }}</result>\n"
    "    {%- else %}<{{ m.role }}>{{ m.content }}{% endif %}\n"
    "{%- endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m['content'] %}{% if part.type == 'text' %}{{ part['text'] }}|{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)
PARTS_ONLY = (
    "{% for m in messages %}{% set c = m.content %}{% for part in c %}<{{ part.text }}>{% endfor %}{% endfor %}"
)
EVERYTHING = (
    "{%- set ns = namespace(n=0, last='') -%}\n{% for m in messages %}\n"
    "  {%- if m.role == 'system' %}{% continue %}{% endif %}\n"
    "  {%- set ns.n = ns.n + 1 %}{% set ns.last = m.content %}{% generation %}{{ m.content }}{% endgeneration %}\n"
    "  {{- loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}\n{%- endfor %}\n"
    "{{ ns.n }} {{ ns.last ~ '!' + '?' * 3 }} {{ {'<b>': 'é&'} | tojson(indent=2) }} {{ dict(a=1) }} {{ 2 ** 10 }}\n"
    "{%- macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice(eos_token) }}{{ messages[::-1][0].content }}"
    "{{ messages | map(attribute='role') | join(',') }}"
    "{% for i in range(3) if i != 1 %}{{ i }}{% else %}none{% endfor %}"
    "{% for i in [] %}{% else %}empty{% endfor %}{{ missing }}{{ enable_thinking is defined }}"
)
CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": " be <b>brief</b> "}, {"role": "user", "content": "é汉🦜"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b\n"},
        {"role": "user", "content": "", "name": "x"},
    ],
]
CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": '{"a": 1, "b": "é"}'}}
TOOL = {"type": "function", "function": {"name": "add", "description": "<adds>", "parameters": {"type": "object"}}}


def template(source: str) -> ChatTemplate:
    """One template of a model whose BOS and EOS are those of `SPECIAL`."""
    return ChatTemplate({"default": source}, special_tokens=SPECIAL)


def transformers_render(source: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """What `apply_chat_template` makes of the messages."""
    from transformers import PreTrainedTokenizerFast

    oracle = PreTrainedTokenizerFast(tokenizer_object=byte_level_backend(), chat_template=source, **SPECIAL)
    options.setdefault("add_generation_prompt", True)
    return oracle.apply_chat_template(messages, tokenize=False, **options)
