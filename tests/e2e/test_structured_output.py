"""Structured output end to end: whatever a model would rather say, and whatever happens around it, the text fits.

A random model over single bytes is the adversary: without a grammar it writes noise.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedserve import LLM, SamplingParams, StructuredOutput
from pagedserve.outputs import CompletionOutput, RequestOutput
from pagedserve.sampling_params import BeamParams
from tests.helpers.byte_tokenizer import EOS_ID, FIRST_BYTE_ID, IM_END_ID
from tests.helpers.checkpoints import tiny_llama
from tests.helpers.demo_model import demo_model

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "é", "🦊", 'q"']}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SIX_FIELDS = {
    "type": "object",
    "properties": {name: {"type": "string", "minLength": 6, "maxLength": 12} for name in "abcdef"},
    "required": list("abcdef"),
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/tree",
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "v": {"$ref": "#/$defs/kind"},
                "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1},
            },
            "required": ["v", "kids"],
            "additionalProperties": False,
        },
        "kind": {"enum": ["x", "y"]},
    },
}
TAG = {"begin": '<c>{"name": "f", "args": ', "schema": {"type": "boolean"}, "end": "}</c>"}
CHOICES = ["🦊", "é", "汉字", 'a"b', "a\\b", "x\ny"]
GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 1.3, "seed": 5, "n": 4}
BEAMS: dict[str, Any] = {"temperature": 0.0, "beam": BeamParams(width=4), "n": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("structured") / "tiny", seed=3, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model=str(model), num_threads=1, num_device_blocks=800) as llm:
        yield llm


def ask(llm: LLM, output: StructuredOutput, prompt: str = "say", **wishes: Any) -> RequestOutput:
    params = SamplingParams(**{"max_tokens": 400, "structured_output": output, **wishes})
    return llm.generate(prompt, params, use_tqdm=False)[0]


def choices(llm: LLM, output: StructuredOutput, **wishes: Any) -> list[CompletionOutput]:
    answer = ask(llm, output, **wishes)
    assert answer.error is None
    return answer.outputs


def fits(schema: dict[str, Any], text: str) -> None:
    jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


@pytest.mark.parametrize("wishes", [GREEDY, SEEDED, BEAMS], ids=["greedy", "seeded", "beams"])
def test_every_kind_gives_what_it_asks_for(llm: LLM, wishes: dict[str, Any]) -> None:  # C057 C059 C061
    for choice in choices(llm, StructuredOutput.json_schema(PERSON), **wishes):
        assert choice.finish_reason == "stop"
        fits(PERSON, choice.text)
    for choice in choices(llm, StructuredOutput.json_schema(TREE), **wishes):
        if choice.finish_reason == "stop":
            fits(TREE, choice.text)
    for choice in choices(llm, StructuredOutput.regex(r"[🌑-🌘]{3}-\d{2}"), **wishes):
        assert re.fullmatch(r"[🌑-🌘]{3}-\d{2}", choice.text)
    for choice in choices(llm, StructuredOutput.choice(CHOICES), **wishes):
        assert choice.text in CHOICES
        assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
    for choice in choices(llm, StructuredOutput.grammar('start: ("ab" | "c"){2,5} "!"'), **wishes):
        assert re.fullmatch("(ab|c){2,5}!", choice.text)
    for choice in choices(llm, StructuredOutput.grammar('root ::= "x" [a-c] "y"'), **wishes):
        assert re.fullmatch("x[a-c]y", choice.text)
    for choice in choices(llm, StructuredOutput.tags([TAG], max=2, separator="\n"), **wishes):
        call = r'<c>\{"name": "f", "args": (true|false)\}</c>'
        assert re.fullmatch(f"{call}(\n{call})?", choice.text)


def test_samples_differ_and_each_follows_its_own_text(llm: LLM) -> None:  # C061
    texts = [choice.text for choice in choices(llm, StructuredOutput.json_schema(PERSON), **SEEDED)]
    assert len(set(texts)) == 4


def test_a_text_ends_where_its_grammar_does(llm: LLM) -> None:  # C060
    comma, brace = (FIRST_BYTE_ID + ord(char) for char in ",}")
    ends = dict.fromkeys((EOS_ID, IM_END_ID, comma, brace), 100.0)
    for wishes in ({}, {"ignore_eos": True}, {"min_tokens": 300}, {"logit_bias": ends}):
        [choice] = choices(llm, StructuredOutput.json_schema(PERSON), **GREEDY, **wishes)
        assert choice.finish_reason == "stop"
        fits(PERSON, choice.text)
    # Stop ids wait for the end, even one that is text elsewhere.
    bias = {token: 100.0 for token in (EOS_ID, ord("\n") + FIRST_BYTE_ID)}
    newline = [FIRST_BYTE_ID + ord("\n")]
    [choice] = choices(llm, StructuredOutput.json_schema(PERSON), **GREEDY, stop_token_ids=newline, logit_bias=bias)
    fits(PERSON, choice.text)


def test_where_more_may_follow_the_wishes_decide(llm: LLM) -> None:
    digits = StructuredOutput.regex("[0-9]+")
    [short] = choices(llm, digits, **GREEDY, logit_bias={EOS_ID: 100.0})
    assert len(short.text) == 1 and short.finish_reason == "stop"
    [longer] = choices(llm, digits, **GREEDY, logit_bias={EOS_ID: 100.0}, min_tokens=5)
    assert len(longer.text) == 5
    [full] = choices(llm, digits, **GREEDY, logit_bias={EOS_ID: 100.0}, ignore_eos=True, max_tokens=30)
    assert len(full.text) == 30 and full.finish_reason == "length"
    [stopped] = choices(llm, digits, **GREEDY, stop_token_ids=[2], logit_bias={2: 100.0})
    assert len(stopped.text) == 1 and stopped.stop_reason == 2


def test_white_space_does_not_use_up_the_tokens(llm: LLM) -> None:  # C056
    blanks = {FIRST_BYTE_ID + ord(char): 30.0 for char in " \t\n"}
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}, "b": {"enum": ["x"]}}}
    schema |= {"required": ["a", "b"], "additionalProperties": False}
    [choice] = choices(llm, StructuredOutput.json_schema(schema), **GREEDY, logit_bias=blanks)
    assert choice.finish_reason == "stop"
    fits(schema, choice.text)
    assert max(map(len, re.findall(r"\s+", choice.text))) <= 17


def test_a_stop_string_may_cut(llm: LLM) -> None:  # C060
    [choice] = choices(llm, StructuredOutput.json_schema(PERSON), **GREEDY, stop=['"age"'])
    assert (choice.finish_reason, choice.stop_reason) == ("stop", '"age"')
    assert choice.text.startswith("{") and '"age"' not in choice.text


def test_logprobs_are_the_model_s_own(llm: LLM) -> None:  # C023 C028
    [free] = llm.generate("say", SamplingParams(max_tokens=1, logprobs=5, **GREEDY), use_tqdm=False)[0].outputs
    [bound] = choices(llm, StructuredOutput.choice(["{}"]), **GREEDY, logprobs=5)
    assert free.logprobs is not None and bound.logprobs is not None
    assert bound.logprobs[0].token_ids[1:] == free.logprobs[0].token_ids[1:]
    assert bound.logprobs[0].logprobs[1:] == free.logprobs[0].logprobs[1:]
    assert bound.logprobs[0].rank > 1


def test_the_grammar_holds_from_a_marker_on(llm: LLM) -> None:
    # The marker is said because nothing else is possible for the first two tokens that matter.
    bias = {FIRST_BYTE_ID + ord(">"): 60.0, EOS_ID: 50.0, FIRST_BYTE_ID + ord("x"): 55.0}
    output = StructuredOutput.choice(["yes", "no"], after_text=">")
    [choice] = choices(llm, output, **GREEDY, logit_bias=bias)
    assert choice.text in (">yes", ">no")
    # Without the marker the text stays free, but it does not end.
    never = {**bias, FIRST_BYTE_ID + ord(">"): -100.0}
    [choice] = choices(llm, output, **GREEDY, logit_bias=never, max_tokens=20)
    assert choice.text == "x" * 20 and choice.finish_reason == "length"


def test_wishes_that_leave_nothing_fail_that_request_alone(llm: LLM) -> None:
    answer = ask(llm, StructuredOutput.choice(["yes"]), **GREEDY, allowed_token_ids=[FIRST_BYTE_ID])
    assert answer.error is not None and "structured output" in answer.error
    assert choices(llm, StructuredOutput.choice(["yes"]))[0].text == "yes"


MANY = [
    (StructuredOutput.json_schema(SIX_FIELDS), {"temperature": 1.0, "seed": 3, "n": 4}),
    (StructuredOutput.json_schema(PERSON), {"temperature": 1.0, "seed": 4}),
    (StructuredOutput.json_schema(SIX_FIELDS), {"temperature": 0.0, "beam": BeamParams(width=3), "n": 3}),
    (None, {"temperature": 1.0, "seed": 6, "n": 2, "max_tokens": 60}),
    (StructuredOutput.regex("[a-z]{40}"), {"temperature": 1.0, "seed": 7}),
]
PROMPTS = ["one " * 12, "two", "three " * 8, "four", "five " * 20]


def texts(llm: LLM) -> list[list[str]]:
    params = [SamplingParams(**{"max_tokens": 150, "structured_output": output, **w}) for output, w in MANY]
    return [[c.text for c in answer.outputs] for answer in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_alone_as_among_neighbours(llm: LLM) -> None:
    together = texts(llm)
    for prompt, (output, wishes), expected in zip(PROMPTS, MANY, together, strict=True):
        params = SamplingParams(**{"max_tokens": 150, "structured_output": output, **wishes})
        alone = llm.generate(prompt, params, use_tqdm=False)[0]
        assert [choice.text for choice in alone.outputs] == expected


@pytest.mark.parametrize(
    "around",
    [
        {"num_device_blocks": 44, "preemption_mode": "swap", "swap_space": "1GiB"},
        {"num_device_blocks": 44, "preemption_mode": "recompute"},
        {"max_num_batched_tokens": 5},
        {"enable_prefix_caching": False, "block_size": 4},
    ],
    ids=["swap", "recompute", "chunks", "small blocks"],
)
def test_memory_and_chunks_change_nothing(llm: LLM, model: Path, around: dict[str, Any]) -> None:  # C061
    expected = texts(llm)
    with LLM(model=str(model), num_threads=1, **{"num_device_blocks": 800, **around}) as other:
        assert texts(other) == expected
        if "preemption_mode" in around:
            assert other.engine.stats.num_preemptions > 0
        other.engine.client.core.scheduler.check()


def small_schemas() -> st.SearchStrategy[dict[str, Any]]:
    leaf = st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.tuples(st.integers(-50, 0), st.integers(0, 500)).map(
            lambda b: {"type": "integer", "minimum": b[0], "maximum": b[1]}
        ),
        st.tuples(st.integers(0, 2), st.integers(2, 5)).map(
            lambda b: {"type": "string", "minLength": b[0], "maxLength": b[1]}
        ),
        st.lists(st.one_of(st.text(max_size=3), st.integers(), st.booleans(), st.none()), min_size=1, max_size=3).map(
            lambda values: {"enum": values}
        ),
        st.sampled_from(["^a+$", "^[0-9]{2}-x$", "b|cd"]).map(lambda p: {"type": "string", "pattern": p}),
        st.sampled_from(["date", "uuid", "ipv4"]).map(lambda f: {"type": "string", "format": f}),
        st.just({"type": ["integer", "null"], "minimum": 0, "maximum": 9}),
    )

    def inner(schemas: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        names = st.sampled_from(["a", "b", "ключ", 'q"', "x y"])
        objects = st.dictionaries(names, schemas, max_size=3).flatmap(
            lambda p: st.sets(st.sampled_from(sorted(p)) if p else st.nothing(), max_size=len(p)).map(
                lambda r: {"type": "object", "properties": p, "required": sorted(r), "additionalProperties": False}
            )
        )
        arrays = st.tuples(schemas, st.integers(0, 1), st.integers(1, 2)).map(
            lambda a: {"type": "array", "items": a[0], "minItems": a[1], "maxItems": a[2]}
        )
        either = st.lists(schemas, min_size=1, max_size=2).map(lambda s: {"anyOf": s})
        return st.one_of(objects, arrays, either)

    return st.recursive(leaf, inner, max_leaves=5)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=small_schemas(), seed=st.integers(0, 1000))
def test_any_small_schema(llm: LLM, schema: dict[str, Any], seed: int) -> None:  # C058
    answer = ask(llm, StructuredOutput.json_schema(schema), temperature=1.0, seed=seed, n=3, max_tokens=300)
    if answer.error is not None:
        assert "cannot be used" in answer.error  # refused, and not silently weakened
        return
    for choice in answer.outputs:
        if choice.finish_reason == "stop":
            fits(schema, choice.text)


@pytest.mark.parametrize(
    "keyword",
    [
        {"pattern": "^a{2,4}$"},
        {"type": "string", "pattern": "^a{2,4}$"},
        {"maxLength": 3},
        {"minimum": 3, "maximum": 40},
        {"type": "number", "exclusiveMinimum": 0.5, "maximum": 7},
        {"type": "integer", "multipleOf": 3, "minimum": 0, "maximum": 99},
        {"uniqueItems": True},
        {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3, "uniqueItems": True},
        {"type": "string", "format": "email", "maxLength": 12},
        {"type": "string", "format": "no-such-format"},
        {"type": "object", "patternProperties": {"^a$": {"type": "integer"}}, "additionalProperties": False},
        {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": {"type": "boolean"}},
        {"type": "object", "propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "boolean"}},
        {"not": {"type": "string"}},
        {"if": {"type": "string"}, "then": {"maxLength": 2}},
        {"dependentRequired": {"a": ["b"]}},
        {"contains": {"type": "integer"}},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"anyOf": [{"type": "integer", "maximum": 5}, {"type": "null"}]},
        {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
        {"const": 1e5},
        {"enum": ['a"b', "a\\b", -0.5, [1, {"x": None}]]},
    ],
    ids=json.dumps,
)
def test_a_keyword_is_enforced_or_refused(llm: LLM, keyword: dict[str, Any]) -> None:  # C058
    answer = ask(llm, StructuredOutput.json_schema(keyword), temperature=1.0, seed=1, n=8, max_tokens=120)
    if answer.error is not None:
        assert "cannot be used" in answer.error
        return
    for choice in answer.outputs:
        if choice.finish_reason == "stop":
            fits(keyword, choice.text)


def test_the_demo_model_fills_in_a_form() -> None:
    with LLM(model=str(demo_model()), max_model_len=512, num_device_blocks=64, num_threads=1) as llm:
        output = StructuredOutput.json_schema(PERSON)
        params = [
            SamplingParams(max_tokens=70, temperature=0.0, structured_output=output),
            SamplingParams(max_tokens=70, temperature=0.0),
        ]
        question = [{"role": "user", "content": "Describe a person: name, age and tags."}]
        bound, free = llm.chat([question, question], params, use_tqdm=False)
    fits(PERSON, bound.outputs[0].text)
    assert free.outputs[0].text and not free.outputs[0].text.startswith("{")
    assert dataclasses.replace(params[0], structured_output=None) == params[1]
