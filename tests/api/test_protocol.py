"""From fields of a request to SamplingParams: defaults, precedence, names in errors."""

from __future__ import annotations

from typing import Any

import pytest

from pagedserve.api.body import validate
from pagedserve.api.protocol.chat import ChatCompletionRequest
from pagedserve.api.protocol.completions import CompletionRequest
from pagedserve.errors import RequestError
from pagedserve.sampling_params import BeamParams, SamplingParams
from tests.api.conftest import Front, FrontFactory
from tests.helpers.streams import check_error

MESSAGES = [{"role": "user", "content": "x"}]


def params(defaults: dict[str, Any] | None = None, **body: Any) -> SamplingParams:
    request = validate(CompletionRequest, {"prompt": "x", **body})
    return request.sampling_params(defaults or {}, max_tokens=16, logprobs=None, best_of=request.best_of)


def test_nothing_given_means_the_defaults_of_the_api() -> None:
    assert params() == SamplingParams(max_tokens=16)


def test_every_sampling_field_arrives() -> None:
    body: dict[str, Any] = {
        "n": 2,
        "best_of": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 7,
        "min_tokens": 2,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "stop": ["a", "b"],
        "stop_token_ids": [1, 2],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "prompt_logprobs": 1,
        "allowed_token_ids": [1, 2, 3],
        "bad_words": ["x"],
    }
    assert params(**body, logit_bias={"5": 1.5}) == SamplingParams(**body, max_tokens=16, logit_bias={5: 1.5})
    assert params(stop="a").stop == ("a",)


def test_the_request_beats_the_model_beats_the_api() -> None:
    defaults = {"temperature": 0.2, "top_k": 1, "repetition_penalty": 1.1, "max_tokens": 5}
    given = params(defaults, temperature=2, top_k=-1)
    assert (given.temperature, given.top_k, given.repetition_penalty, given.top_p) == (2, -1, 1.1, 1.0)
    assert given.max_tokens == 16


def test_beam_search() -> None:
    given = params({"temperature": 0.2}, use_beam_search=True, n=2, best_of=4, length_penalty=0.5, early_stopping=True)
    assert given.beam == BeamParams(width=4, length_penalty=0.5, early_stopping=True)
    assert (given.n, given.best_of, given.temperature) == (2, None, 1.0)
    assert params(use_beam_search=True, n=3).beam == BeamParams(width=3)
    assert params(use_beam_search=True, beam_width=5).beam == BeamParams(width=5)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 3, "max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
    ],
    ids=str,
)
def test_errors_name_the_field_as_the_client_calls_it(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        request = validate(ChatCompletionRequest, {"messages": MESSAGES, **body})
        request.check()
        request.sampling_params({}, max_tokens=request.max_tokens_asked, logprobs=request.logprobs_asked)
    assert caught.value.param == param
    assert param in caught.value.message


def test_max_completion_tokens_wins() -> None:
    request = validate(ChatCompletionRequest, {"messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 5})
    assert request.max_tokens_asked == 5


@pytest.mark.parametrize(
    ("body", "asked"), [({}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 3}, 3)], ids=str
)
def test_logprobs_of_chat(body: dict[str, Any], asked: int | None) -> None:
    assert validate(ChatCompletionRequest, {"messages": MESSAGES, **body}).logprobs_asked == asked


def test_chat_takes_the_models_longest_answer_as_a_default(make_front: FrontFactory) -> None:
    front = make_front()
    front.engine.default_sampling_params = {"max_tokens": 3}
    assert front.chat().json()["usage"]["completion_tokens"] == 3
    assert front.chat(max_tokens=4).json()["usage"]["completion_tokens"] == 4
    assert front.complete().json()["usage"]["completion_tokens"] == 6


def test_options_that_go_to_the_engine(make_front: FrontFactory) -> None:
    front = make_front(priorities=True)
    front.complete(timeout=5, priority=-3, cache_salt="s")
    seen = front.engine.seen[-1]
    assert (seen["timeout"], seen["priority"], seen["cache_salt"]) == (5, -3, "s")
    front.complete(timeout=2.5, priority=0)
    assert front.engine.seen[-1]["timeout"] == 2.5


def test_template_variables_reach_the_template(front: Front) -> None:
    front.engine.chat_template = type(front.engine.chat_template)({"default": "{{ mood }} {{ reasoning_effort }}"})
    body = {"chat_template_kwargs": {"mood": "say good"}, "reasoning_effort": "high"}
    assert front.chat(**body).json()["choices"][0]["message"]["content"] == "good high"


def test_a_template_that_refuses_is_a_400(front: Front) -> None:  # C064, C065
    source = "{{ raise_exception('no system role here') }}"
    front.engine.chat_template = type(front.engine.chat_template)({"default": source})
    for stream in (False, True):
        assert "no system role here" in check_error(front.chat(stream=stream), 400)["message"]
    front.engine.chat_template = type(front.engine.chat_template)({})
    assert "chat template" in check_error(front.chat(), 400)["message"]
    assert front.complete().status_code == 200
