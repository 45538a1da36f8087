"""Chat templates against transformers; which template is taken; what it may refuse (C063-C065, C069)."""

from __future__ import annotations

import json

import pytest
from transformers import PreTrainedTokenizerFast

from pagedserve.engine.chat_template import RESERVED_KWARGS, ChatTemplate
from pagedserve.engine.tokenizer import Tokenizer
from pagedserve.errors import ConfigError, RequestError
from pagedserve.model_files import resolve
from tests.helpers.byte_tokenizer import CHATML, write_tokenizer
from tests.helpers.chat_templates import (
    CONVERSATIONS,
    EVERYTHING,
    PARTS,
    SPECIAL,
    TOOL,
    TOOLS,
    template,
    transformers_render,
)
from tests.helpers.tokenizers import SPM_CHAT, byte_level_backend, write_spm_tokenizer

STRICT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}{{ m.role }}: "
    "{{ m.content | trim }}\n{% endfor %}"
)


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


def test_c069_lone_surrogates():
    for messages in (
        [{"role": "user", "content": "\ud83d"}],
        [{"role": "user", "content": [{"type": "text", "text": "\udc00"}]}],
    ):
        with pytest.raises(RequestError, match="lone surrogate"):
            template(CHATML).render(messages)
    assert "\x00\ufeff" in template(CHATML).render([{"role": "user", "content": "\x00\ufeff"}])


def test_tools_that_the_template_would_drop_are_refused():
    with pytest.raises(RequestError, match="does not know tools") as caught:
        template(CHATML).render(CONVERSATIONS[0], tools=[TOOL])
    assert caught.value.param == "tools"
    assert not template(CHATML).supports_tools
    with_default = "{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools[0].function.name }}"
    assert template(with_default).supports_tools
    assert template(with_default).render(CONVERSATIONS[0], tools=[TOOL]) == "add"


@pytest.mark.parametrize("name", sorted(RESERVED_KWARGS))
def test_c106_reserved_kwargs(name):
    with pytest.raises(RequestError, match=name) as caught:
        template(CHATML).render(CONVERSATIONS[0], chat_template_kwargs={name: "x"})
    assert caught.value.param == "chat_template_kwargs"
