"""SamplingParams refuses what it cannot honour, and names the field."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest

from pagedserve.errors import RequestError
from pagedserve.sampling_params import MAX_STOP_STRINGS, BeamParams, SamplingParams, StructuredOutput


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", v) for v in (-0.1, float("nan"), float("inf"), "hot", True, None)],
        *[("top_p", v) for v in (0.0, -0.5, 1.1, float("nan"))],
        *[("top_k", v) for v in (-2, 0.5, "5", True)],
        *[("min_p", v) for v in (-0.1, 1.1, float("nan"))],
        *[("presence_penalty", v) for v in (-2.1, 2.1, float("inf"))],
        *[("frequency_penalty", v) for v in (-2.1, 2.1, float("nan"))],
        *[("repetition_penalty", v) for v in (0.0, -1.0, float("inf"))],
        *[("max_tokens", v) for v in (-1, 1.5, "7", True, [], 2**31, 10**30)],
        *[("min_tokens", v) for v in (-1, 0.5)],
        *[("n", v) for v in (0, -1, 10**6, 1.0)],
        *[("best_of", v) for v in (0, 10**6)],
        *[("seed", v) for v in (2**63, 0.5, "1", True)],
        *[("logprobs", v) for v in (-1, 1.5, True)],
        *[("stop", v) for v in ("", [""], [None], 5, ["x"] * (MAX_STOP_STRINGS + 1), ["x" * 100_000])],
        *[("stop_token_ids", v) for v in ([-5], ["1"], [1.5], [True], 5)],
        *[("allowed_token_ids", v) for v in ([], [-1], ["a"])],
        *[("bad_words", v) for v in ([""], ["  "], [5], ["w"] * 10**5)],
        *[("structured_output", v) for v in ("json", {"type": "object"}, 5)],
        *[("logit_bias", v) for v in ({-1: 5.0}, {5: 101.0}, {5: "x"}, {5: float("nan")}, {"5": 1.0}, [5])],
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RequestError) as raised:
        SamplingParams(**{field: value})
    assert raised.value.param == field
    assert field in raised.value.message


def test_limits_that_concern_two_fields() -> None:
    with pytest.raises(RequestError, match="best_of"):
        SamplingParams(n=3, best_of=2)
    with pytest.raises(RequestError, match="min_tokens"):
        SamplingParams(max_tokens=4, min_tokens=5)
    with pytest.raises(RequestError, match="beam_width"):
        SamplingParams(n=3, beam=BeamParams(width=2))


@pytest.mark.parametrize("value", [0, 1, -1, 2**40])
def test_top_k_beyond_any_vocabulary_is_off_not_an_error(value: int) -> None:
    assert SamplingParams(top_k=value).top_k == value


def test_lists_become_tuples_and_none_means_absent() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[1, 2], bad_words=None, allowed_token_ids=[3])
    assert params.stop == ("END",)
    assert params.stop_token_ids == (1, 2)
    assert params.bad_words == ()
    assert params.allowed_token_ids == (3,)


def test_params_are_immutable_and_a_copy_is_validated() -> None:
    params = SamplingParams(n=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 3  # type: ignore[misc]
    assert params.with_(n=4).n == 4
    with pytest.raises(RequestError):
        params.with_(temperature=-1)


@pytest.mark.parametrize("temperature", [0, 1e-8, 1e-6, 1e-5, 1e-4])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).is_greedy


def test_how_many_sequences_are_computed() -> None:
    assert SamplingParams(n=2).num_sequences == 2
    assert SamplingParams(n=2, best_of=5).num_sequences == 5
    assert SamplingParams(n=2, beam=BeamParams(width=4)).num_sequences == 4


def test_a_schema_is_held_as_json_in_its_own_order() -> None:
    schema = {"properties": {"b": {"const": "é"}, "a": {}}, "type": "object"}
    output = StructuredOutput.json_schema(schema, prefix="<a>")
    assert output.value == '{"properties":{"b":{"const":"é"},"a":{}},"type":"object"}'
    assert output == StructuredOutput.json_schema(output.value, prefix="<a>")
    assert {output: 1}[output] == 1
    tags = StructuredOutput.tags([{"begin": "<f>", "schema": schema, "end": "</f>"}], max=2)
    assert json.loads(tags.value)["tags"][0]["schema"] == schema


@pytest.mark.parametrize(
    "make",
    [
        lambda: StructuredOutput(kind="xml", value="x"),
        lambda: StructuredOutput.regex(""),
        lambda: StructuredOutput.choice([]),
        lambda: StructuredOutput.tags([]),
        lambda: StructuredOutput.grammar(5),
        lambda: StructuredOutput.json_schema({"const": float("nan")}),
        lambda: StructuredOutput.json_schema({"const": {1}}),
        lambda: StructuredOutput.json_object(prefix=None),
        lambda: StructuredOutput.json_object(after_text=""),
    ],
)
def test_a_structured_output_that_says_nothing_is_refused(make: Callable[[], StructuredOutput]) -> None:
    with pytest.raises(RequestError) as raised:
        make()
    assert raised.value.param == "structured_output"
