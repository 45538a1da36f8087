"""Chat templates against transformers; malformed messages; hostile templates (C053, C063-C066, C068, C069, C106)."""

from __future__ import annotations

import json
import threading

import pytest
from transformers import PreTrainedTokenizerFast

from pagedserve.engine import template_sandbox
from pagedserve.engine.chat_template import RESERVED_KWARGS, ChatTemplate
from pagedserve.engine.tokenizer import Tokenizer
from pagedserve.errors import ConfigError, RequestError
from pagedserve.model_files import resolve
from tests.helpers.byte_tokenizer import CHATML, write_tokenizer
from tests.helpers.tokenizers import SPM_CHAT, byte_level_backend, write_spm_tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

STRICT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}{{ m.role }}: "
    "{{ m.content | trim }}\n{% endfor %}"
)
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


def transformers_render(template, messages, **options):
    oracle = PreTrainedTokenizerFast(tokenizer_object=byte_level_backend(), chat_template=template, **SPECIAL)
    options.setdefault("add_generation_prompt", True)
    return oracle.apply_chat_template(messages, tokenize=False, **options)


def template(source, **special):
    return ChatTemplate({"default": source}, special_tokens={**SPECIAL, **special})


@pytest.mark.parametrize("source", [CHATML, SPM_CHAT, TOOLS, PARTS, EVERYTHING])
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_as_transformers_does(source, messages, add_generation_prompt):
    ours = template(source).render(messages, add_generation_prompt=add_generation_prompt)
    assert ours == transformers_render(source, messages, add_generation_prompt=add_generation_prompt)


def test_the_demo_models_own_template(tmp_path):
    from tests.helpers.demo_model import demo_model

    tokenizer = Tokenizer.load(resolve(str(demo_model())), cache_dir=tmp_path)
    ours = ChatTemplate.load(tokenizer)
    oracle = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend,
        chat_template=tokenizer.chat_templates["default"],
        **tokenizer.special_tokens,
    )
    for messages in CONVERSATIONS:
        text = ours.render(messages)
        assert text == oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = oracle.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert tokenizer.encode(text, add_special_tokens=False) == ids


def test_kwargs_and_documents_reach_the_template():
    source = (
        "{% if enable_thinking %}think {% endif %}{{ bos_token }}{% for d in documents %}{{ d.title }},{% endfor %}"
    )
    documents = [{"title": "A", "text": "x"}, {"title": "B", "text": "y"}]
    ours = template(source).render(
        CONVERSATIONS[0],
        documents=documents,
        chat_template_kwargs={"enable_thinking": True, "bos_token": "B"},
    )
    assert ours == "think BA,B,"
    assert ours == transformers_render(
        source, CONVERSATIONS[0], documents=documents, enable_thinking=True, bos_token="B"
    )


@pytest.mark.parametrize("last", ["Once upon", "Once upon ", " padded\n"])
@pytest.mark.parametrize("source", [CHATML, STRICT, PARTS])
def test_continue_final_message(source, last):
    messages = [{"role": "user", "content": "Tell"}, {"role": "assistant", "content": last}]
    ours = template(source).render(messages, add_generation_prompt=False, continue_final_message=True)
    oracle = transformers_render(source, messages, add_generation_prompt=False, continue_final_message=True)
    assert ours == oracle
    assert ours.rstrip().endswith(last.strip())


def test_continue_final_message_mistakes():
    chat = template(CHATML)
    with pytest.raises(RequestError) as caught:
        chat.render(CONVERSATIONS[0], continue_final_message=True)
    assert caught.value.param == "continue_final_message"
    with pytest.raises(RequestError, match="no text to go on with"):
        chat.render([{"role": "assistant", "content": ""}], add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(RequestError, match="leaves out the last message"):
        template("{{ messages[0].content }}").render(
            CONVERSATIONS[2][:2], add_generation_prompt=False, continue_final_message=True
        )


# -- C063: BOS ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat_template", [SPM_CHAT, CHATML])
def test_c063_bos_is_what_the_template_wrote(tmp_path, chat_template):
    from transformers import AutoTokenizer

    write_spm_tokenizer(tmp_path, chat_template=chat_template)
    tokenizer = Tokenizer.load(resolve(str(tmp_path), require_weights=False), cache_dir=tmp_path)
    ids = tokenizer.encode(ChatTemplate.load(tokenizer).render(CONVERSATIONS[0]), add_special_tokens=False)
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    assert ids == oracle.apply_chat_template(CONVERSATIONS[0], add_generation_prompt=True)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == (1 if chat_template == SPM_CHAT else 0)
    assert tokenizer.encode("Hi").count(tokenizer.bos_token_id) == 1


# -- C064, C065: which template, and templates that refuse ------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (CONVERSATIONS[1], "System role not supported"),
        ([CONVERSATIONS[0][0]] * 2, "Roles must alternate user/assistant"),
    ],
)
def test_c064_the_templates_own_message(messages, message):
    with pytest.raises(RequestError, match=message) as caught:
        template(STRICT).render(messages)
    assert caught.value.status_code == 400 and caught.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ missing.field }}", "'missing' is undefined"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages[7].content.x }}", "undefined|no element"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ strftime_now(3) }}", "TypeError"),
    ],
)
def test_c064_faults_in_a_template_are_the_requests_fault_not_a_crash(source, message):
    with pytest.raises(RequestError, match=message):
        template(source).render(CONVERSATIONS[0])


def test_c064_syntax_errors(caplog):
    tokenizer = Tokenizer(byte_level_backend(), chat_templates={"default": "{% for x in %}"})
    chat = ChatTemplate.load(tokenizer)
    assert not chat.exists
    with pytest.raises(RequestError, match="syntax error in line 1"):
        chat.render(CONVERSATIONS[0])
    with pytest.raises(ConfigError, match="--chat-template: syntax error in line 2"):
        ChatTemplate.load(tokenizer, "\n{% endif %}")


def test_c065_no_template():
    chat = ChatTemplate.load(Tokenizer(byte_level_backend()))
    assert not chat.exists
    with pytest.raises(RequestError, match="no chat template: use /v1/completions"):
        chat.render(CONVERSATIONS[0])


def test_c065_override_by_file_or_inline(tmp_path):
    tokenizer = Tokenizer(byte_level_backend(), chat_templates={"default": "own"}, special_tokens=SPECIAL)
    assert ChatTemplate.load(tokenizer).render(CONVERSATIONS[0]) == "own"
    (tmp_path / "chat.jinja").write_text("file {{ messages[0].content }}")
    assert ChatTemplate.load(tokenizer, str(tmp_path / "chat.jinja")).render(CONVERSATIONS[0]) == "file Hi"
    assert ChatTemplate.load(tokenizer, "inline {{ eos_token }}").render(CONVERSATIONS[0]) == "inline </s>"
    long_inline = "{% if true %}" + "x" * 5000 + "{% endif %}"
    assert ChatTemplate.load(tokenizer, long_inline).render(CONVERSATIONS[0]) == "x" * 5000
    with pytest.raises(ConfigError, match="no such file"):
        ChatTemplate.load(tokenizer, str(tmp_path / "missing.jinja"))


def test_c065_named_templates(tmp_path):
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": TOOLS}]
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for value in (named, {entry["name"]: entry["template"] for entry in named}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": value}))
        chat = load_from(tmp_path)
        assert chat.render(CONVERSATIONS[0]) == transformers_render(CHATML, CONVERSATIONS[0])
        assert chat.supports_tools
        assert chat.render(CONVERSATIONS[0], tools=[TOOL]) == transformers_render(TOOLS, CONVERSATIONS[0], tools=[TOOL])
        assert chat.render(CONVERSATIONS[0], tools=[]) == chat.render(CONVERSATIONS[0])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": [named[1]]}))
    with pytest.raises(RequestError, match=r"several chat templates \(tool_use\) but none named default"):
        load_from(tmp_path).render(CONVERSATIONS[0])


def test_c065_template_files_win(tmp_path):
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from file {{ messages[0].content }}")
    assert load_from(tmp_path).render(CONVERSATIONS[0]) == "from file Hi"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with {{ tools[0].function.name }}")
    chat, oracle = load_from(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for tools in (None, [TOOL]):
        assert chat.render(CONVERSATIONS[0], tools=tools) == oracle.apply_chat_template(
            CONVERSATIONS[0], tools=tools, tokenize=False
        )


def test_chat_template_json_of_processors(tmp_path):
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json {{ messages[0].content }}"}))
    assert load_from(tmp_path).render(CONVERSATIONS[0]) == "json Hi"


def load_from(folder):
    return ChatTemplate.load(Tokenizer.load(resolve(str(folder), require_weights=False), cache_dir=folder))


# -- C053, C066, C068: messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("absent", [{"content": None}, {"content": ""}, {"content": []}, {}])
def test_c053_tool_history(absent):
    question = {"role": "user", "content": "1+?"}
    for result in ("21", [{"type": "text", "text": "21"}]):
        messages = [
            question,
            {"role": "assistant", "tool_calls": [CALL], **absent},
            {"role": "tool", "tool_call_id": "c1", "content": result},
        ]
        parsed = {**CALL, "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}
        normalized = [
            question,
            {"role": "assistant", "content": "", "tool_calls": [parsed]},
            {"role": "tool", "tool_call_id": "c1", "content": "21"},
        ]
        text = template(TOOLS).render(messages, tools=[TOOL])
        assert text == transformers_render(TOOLS, normalized, tools=[TOOL])
        assert '[add({"a": 1, "b": "é"})]' in text and "<result>21</result>" in text


def test_c053_empty_tool_calls_are_none():
    source = "{{ messages[0].tool_calls is defined }} {{ messages[0].content }}"
    for calls in ([], None):
        message = {"role": "assistant", "content": "x", "tool_calls": calls}
        assert template(source).render([message]) == "False x"


@pytest.mark.parametrize("arguments", ["{broken", "[1]", '"text"', "1", 5, "[" * 100_000])
def test_c053_invalid_arguments(arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(RequestError, match=r"messages\[0\]\.tool_calls\[0\]\.function\.arguments"):
        template(TOOLS).render([{"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize("arguments", ["", " ", None, "{}", {}])
def test_c053_no_arguments(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    assert "[f({})]" in template(TOOLS).render([{"role": "assistant", "tool_calls": [call]}])


def test_messages_of_the_caller_stay_as_they_are():
    messages = [
        {"role": "developer", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ]
    before = json.dumps(messages)
    template(TOOLS).render(messages)
    template(PARTS).render([{"role": "assistant", "content": [{"type": "text", "text": "go"}]}])
    assert json.dumps(messages) == before


TWO_PARTS = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_c066_parts(role):
    messages = [{"role": role, "content": TWO_PARTS}]
    assert "A\nB" in template("{{ messages[0].content }}").render(messages)
    assert template(PARTS).render(messages) == f"<{role}>A|B|" == transformers_render(PARTS, messages)
    assert template(PARTS_ONLY).render(messages) == "<A><B>" == transformers_render(PARTS_ONLY, messages)


def test_c066_text_for_a_template_that_only_knows_parts():
    assert template(PARTS_ONLY).render([{"role": "user", "content": "text"}]) == "<text>"
    assert template(PARTS_ONLY).render([{"role": "user", "content": []}]) == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}], "reads text only"),
        ([*TWO_PARTS, {"type": "input_image", "image_url": "file:///etc/passwd"}], r"content\[2\].*reads text only"),
        ([{"type": "hologram", "text": "x"}], "'hologram'; known: text"),
        ([{"type": "text"}], "has no text"),
        ([{"type": "text", "text": 5}], "has no text"),
        ([{"text": "x"}], "type is missing"),
        ([""], "must be an object"),
        ([None], "must be an object"),
        (5, "must be text or a list"),
        ({"type": "text"}, "must be text or a list"),
        (True, "must be text or a list"),
    ],
)
def test_c066_bad_parts(content, message):
    with pytest.raises(RequestError, match=message) as caught:
        template(CHATML).render([{"role": "user", "content": content}])
    assert caught.value.param == "messages" and "messages[0].content" in str(caught.value)


def test_c066_other_names_of_text_parts():
    parts = [
        {"type": "input_text", "text": "A"},
        {"type": "output_text", "text": "B"},
        {"type": "refusal", "refusal": "C"},
    ]
    assert template("{{ messages[0].content }}").render([{"role": "user", "content": parts}]) == "A\nB\nC"


@pytest.mark.parametrize(
    "messages",
    [
        *([], None, {}, "hi", [None], [[]], ["hi"], 5),
        *([{"role": "user"}], [{"content": "x"}], [{"role": "wizard", "content": "x"}], [{"role": 5, "content": "x"}]),
        *([{"role": ["user"], "content": "x"}], [{"role": "user", "content": None}], [{"role": "assistant"}]),
        *([{"role": "assistant", "tool_calls": "x"}], [{"role": "assistant", "tool_calls": [5]}]),
        [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
    ],
)
def test_c068_odd_messages(messages):
    with pytest.raises(RequestError) as caught:
        template(CHATML).render(messages)
    assert caught.value.param == "messages" and caught.value.status_code == 400
    assert len(str(caught.value)) < 300


def test_c068_developer_role():
    message = [{"role": "developer", "content": "x"}]
    assert template("{{ messages[0].role }}").render(message) == "system"
    assert template("{# developer #}{{ messages[0].role }}").render(message) == "developer"


def test_c068_many_messages():
    messages = [{"role": "user", "content": f"message {i}"} for i in range(2000)]
    assert template(CHATML).render(messages) == transformers_render(CHATML, messages)


def test_c069_lone_surrogates():
    for messages in (
        [{"role": "user", "content": "\ud83d"}],
        [{"role": "user", "content": [{"type": "text", "text": "\udc00"}]}],
    ):
        with pytest.raises(RequestError, match="lone surrogate"):
            template(CHATML).render(messages)
    assert "\x00\ufeff" in template(CHATML).render([{"role": "user", "content": "\x00\ufeff"}])


def test_earlier_reasoning_is_under_every_name():
    source = "{{ messages[0].reasoning_content }}/{{ messages[0].thinking }}"
    for name in ("reasoning_content", "reasoning", "thinking"):
        messages = [{"role": "assistant", "content": "x", name: "hm"}]
        assert template(source).render(messages) == "hm/hm" == transformers_render(source, messages)


def test_tools_that_the_template_would_drop_are_refused():
    with pytest.raises(RequestError, match="does not know tools") as caught:
        template(CHATML).render(CONVERSATIONS[0], tools=[TOOL])
    assert caught.value.param == "tools"
    assert not template(CHATML).supports_tools
    with_default = "{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools[0].function.name }}"
    assert template(with_default).supports_tools
    assert template(with_default).render(CONVERSATIONS[0], tools=[TOOL]) == "add"


# -- C106: hostile templates ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(RESERVED_KWARGS))
def test_c106_reserved_kwargs(name):
    with pytest.raises(RequestError, match=name) as caught:
        template(CHATML).render(CONVERSATIONS[0], chat_template_kwargs={name: "x"})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) recursive %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
        "{% for i in range(99999) %}{% set x = range(99999) | list %}{% endfor %}",
    ],
)
def test_c106_endless_templates_are_cut_off(monkeypatch, source):
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.2)
    with pytest.raises(RequestError, match=r"took more than 0\.2 s"):
        template(source).render(CONVERSATIONS[0])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ 'a' * 10 ** 9 }}", "repetition"),
        ("{{ 10 ** 9 * ['a'] }}", "repetition"),
        ("{{ 9 ** 99999 }}", "power"),
        ("{{ range(10 ** 7) | list }}", "Range too big"),
        (
            "{% set ns = namespace(s='aaaa') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
            "built a text",
        ),
        (
            "{% set ns = namespace(s='aaaa') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
            "built a text",
        ),
        ("{% for i in range(99) %}{{ 'a' * 1000000 }}{% endfor %}", "more than"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "too deeply nested"),
    ],
)
def test_c106_large_results_are_cut_off(source, message):
    with pytest.raises(RequestError, match=message):
        template(source).render(CONVERSATIONS[0])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ (messages | attr('__class__')).__name__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ dict.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_c106_the_sandbox_holds(source):
    with pytest.raises(RequestError):
        template(source).render(CONVERSATIONS[0])


def test_rendering_in_many_threads():
    """The budget of one rendering is no other's."""
    chat, results = template(EVERYTHING), []
    expected = [chat.render(messages) for messages in CONVERSATIONS]

    def work():
        results.append([chat.render(messages) for messages in CONVERSATIONS for _ in range(20)])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[text for text in expected for _ in range(20)]] * 8
