"""Clients that people build on, against a live server: LangChain's ChatOpenAI and LiteLLM, streaming and not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from tests.api.conftest import Front, FrontFactory
from tests.helpers.tool_formats import hermes, template_with

# What the packages and what they import warn about on their own account.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")

ARGUMENTS = {"city": "Brno 🦜"}
SAID = f"<think>hm</think>Let me see. {hermes([('get_weather', ARGUMENTS), ('get_weather', {'city': 'Oslo'})])}"


class Weather(BaseModel):
    """How the weather is."""

    city: str


@pytest.fixture(scope="module")
def thinking_front(make_front: FrontFactory) -> Front:
    return make_front(template=template_with("<tool_call> <think>"))


@pytest.fixture
def server(thinking_front: Front, monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    # Neither is to call home, nor to read settings of whoever runs the tests.
    for name in ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2", "OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_API_BASE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    thinking_front.engine.script = SAID
    yield thinking_front
    thinking_front.engine.script, thinking_front.engine.stride = None, 1


def langchain(server: Front) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model="fake", base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, max_tokens=300, timeout=30
    )


WEATHER_TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather.", "parameters": Weather.model_json_schema()},
}


def test_langchain_binds_tools(server: Front) -> None:
    model = langchain(server).bind_tools([WEATHER_TOOL])
    answer = model.invoke("hi")
    assert answer.content == "Let me see."
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [
        ("get_weather", ARGUMENTS),
        ("get_weather", {"city": "Oslo"}),
    ]
    assert answer.invalid_tool_calls == []
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    assert answer.usage_metadata["output_token_details"]["reasoning"] == len("<think>hm</think>")
    added = None
    for chunk in model.stream("hi"):
        added = chunk if added is None else added + chunk
    assert added is not None
    assert added.content == answer.content
    assert [(c["name"], c["args"]) for c in added.tool_calls] == [(c["name"], c["args"]) for c in answer.tool_calls]
    # The answer and the tool's result go back as history.
    from langchain_core.messages import HumanMessage, ToolMessage

    result = ToolMessage("sunny", tool_call_id=answer.tool_calls[0]["id"])
    model.invoke([HumanMessage("hi"), answer, result])
    prompt = server.engine.tokenizer.decode(server.engine.seen[-1]["prompt"])
    assert f"[get_weather({json.dumps(ARGUMENTS, ensure_ascii=False)})]" in prompt
    assert "sunny" in prompt


def test_langchain_structured_output_by_tool(server: Front) -> None:
    server.engine.script = hermes([("Weather", ARGUMENTS)])
    model = langchain(server).with_structured_output(Weather, method="function_calling")
    assert model.invoke("hi") == Weather(**ARGUMENTS)
    asked = server.engine.seen[-1]["params"].structured_output
    assert asked is not None, "the function that it names is forced"


def litellm_fixed(server: Front) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    return {
        "model": "hosted_vllm/fake",
        "api_base": f"{server.base_url}/v1",
        "api_key": "none",
        "messages": messages,
        "tools": [WEATHER_TOOL],
        "max_tokens": 300,
        "num_retries": 0,
    }


def test_litellm_sees_calls_and_reasoning(server: Front) -> None:
    import litellm

    answer = litellm.completion(**litellm_fixed(server)).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content == "Let me see."
    assert answer.message.reasoning_content == "hm"
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in answer.message.tool_calls]
    assert calls == [("get_weather", ARGUMENTS), ("get_weather", {"city": "Oslo"})]
    chunks = list(litellm.completion(**litellm_fixed(server), stream=True))
    built = litellm.stream_chunk_builder(chunks).choices[0]
    assert built.finish_reason == "tool_calls"
    assert built.message.content == "Let me see."
    assert built.message.reasoning_content == "hm"
    streamed = [(call.function.name, json.loads(call.function.arguments)) for call in built.message.tool_calls]
    assert streamed == calls
