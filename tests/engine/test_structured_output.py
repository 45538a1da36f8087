"""Grammars at work: compiled in threads, kept, bounded; masks as bits over the model's tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedserve import model_files
from pagedserve.config import StructuredOutputConfig
from pagedserve.engine.structured_output import Matcher, StructuredOutputs
from pagedserve.engine.tokenizer import Tokenizer
from pagedserve.errors import RequestError
from pagedserve.sampling_params import BeamParams, SamplingParams, StructuredOutput
from pagedserve.sequence import Request
from tests.helpers.byte_tokenizer import EOS_ID, FIRST_BYTE_ID, IM_END_ID, byte_ids, write_tokenizer

YES_NO = StructuredOutput.choice(["yes", "no"])
PATIENCE = 60.0
ES_ID = FIRST_BYTE_ID + 256 + 11


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.load(model_files.resolve(str(folder), require_weights=False))


@pytest.fixture
def grammars(tokenizer: Tokenizer) -> StructuredOutputs:
    return StructuredOutputs(lambda: tokenizer, StructuredOutputConfig())


def request(output: StructuredOutput, name: str = "r", **wishes: Any) -> Request:
    params = SamplingParams(structured_output=output, max_tokens=100, **wishes)
    return Request(
        request_id=name, prompt_token_ids=[9], sampling_params=params, seed=0, eos_token_ids=(EOS_ID, IM_END_ID)
    )


def settle(grammars: StructuredOutputs) -> dict[str, Matcher | RequestError]:
    """Everything that is pending, once it is ready."""
    ready: dict[str, Matcher | RequestError] = {}
    limit = time.monotonic() + PATIENCE
    while grammars.wait(0.05):
        assert time.monotonic() < limit
        ready.update(grammars.take_ready())
    return ready


def matcher(grammars: StructuredOutputs, output: StructuredOutput, **wishes: Any) -> Matcher:
    asked = request(output, **wishes)
    found = grammars.begin(asked) or settle(grammars)["r"]
    if isinstance(found, RequestError):
        raise found
    return found


def possible(grammars: StructuredOutputs, *matchers: Matcher) -> list[set[int]]:
    """The tokens that masks leave."""
    words = np.frombuffer(grammars.fill_masks(matchers), dtype="<u4").reshape(len(matchers), -1)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def follow(found: Matcher, text: str, prompt: int = 1) -> None:
    found.follow([9] * prompt + byte_ids(text), prompt)


def test_a_mask_is_the_tokens_that_may_come(grammars: StructuredOutputs) -> None:
    found = matcher(grammars, YES_NO)
    # "no" is also one token, of two letters.
    [ids] = possible(grammars, found)
    assert {FIRST_BYTE_ID + ord("y"), FIRST_BYTE_ID + ord("n")} < ids
    assert {grammars._table.tokens[i] for i in ids} == {b"y", b"n", b"no"}  # type: ignore[union-attr]
    follow(found, "y")
    # What is forced is said in the model's own tokens.
    assert possible(grammars, found) == [{ES_ID}]
    follow(found, "yes")
    assert found.is_complete
    assert possible(grammars, found) == [{EOS_ID, IM_END_ID}]
    assert found.error is None


def test_masks_do_not_depend_on_the_rows_beside_them(grammars: StructuredOutputs) -> None:
    outputs = [YES_NO, StructuredOutput.json_object(), StructuredOutput.regex("[a-f]+"), StructuredOutput.choice(["é"])]
    matchers = [matcher(grammars, output) for output in outputs * 4]
    alone = [possible(grammars, found)[0] for found in matchers]
    assert possible(grammars, *matchers) == alone


def test_a_fork_goes_its_own_way(grammars: StructuredOutputs) -> None:
    first = matcher(grammars, YES_NO)
    follow(first, "n")
    second = first.fork()
    follow(first, "no")
    assert first.is_complete and not second.is_complete
    assert possible(grammars, second) == [{FIRST_BYTE_ID + ord("o")}]


@pytest.mark.parametrize(
    ("wishes", "ends"),
    [
        ({}, {EOS_ID, IM_END_ID}),
        ({"stop_token_ids": [2]}, {EOS_ID, IM_END_ID, 2}),
        ({"ignore_eos": True}, set()),
        ({"ignore_eos": True, "stop_token_ids": [2]}, {2}),
        ({"min_tokens": 2}, set()),
        ({"stop_token_ids": [FIRST_BYTE_ID + ord("7")]}, {EOS_ID, IM_END_ID, FIRST_BYTE_ID + ord("7")}),
    ],
)
def test_which_tokens_may_end_a_text_that_could_go_on(
    grammars: StructuredOutputs, wishes: dict[str, Any], ends: set[int]
) -> None:  # C060
    digits = {FIRST_BYTE_ID + ord(str(digit)) for digit in range(10)}
    found = matcher(grammars, StructuredOutput.regex("[0-9]+"), **wishes)
    stops = set(wishes.get("stop_token_ids", ()))
    assert possible(grammars, found) == [digits - stops]
    follow(found, "1")
    assert possible(grammars, found) == [(digits - stops) | ends]


def test_a_stop_token_that_the_grammar_needs_is_possible(grammars: StructuredOutputs) -> None:
    need = [ES_ID]
    found = matcher(grammars, YES_NO, stop_token_ids=need)
    follow(found, "y")
    assert possible(grammars, found) == [set(need)]


def test_before_its_marker_a_text_is_free_but_for_its_end(grammars: StructuredOutputs) -> None:
    found = matcher(grammars, StructuredOutput.choice(["ok"], after_text="</t>"))
    [ids] = possible(grammars, found)
    assert not ids & {EOS_ID, IM_END_ID, 320}
    assert len(ids) >= 318
    follow(found, "hm </t")
    assert not found.is_complete and len(possible(grammars, found)[0]) >= 318
    follow(found, "hm </t>")
    assert possible(grammars, found) == [{FIRST_BYTE_ID + ord("o")}]
    follow(found, "hm </t>ok")
    assert found.is_complete


def test_equal_grammars_are_compiled_once_and_kept(
    grammars: StructuredOutputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[StructuredOutput] = []
    compile_one = grammars._compile
    monkeypatch.setattr(grammars, "_compile", lambda key: (compiled.append(key), compile_one(key))[1])
    assert [grammars.begin(request(YES_NO, name)) for name in "abc"] == [None] * 3
    assert grammars.num_pending == 3
    ready = settle(grammars)
    assert set(ready) == set("abc") and len({id(found) for found in ready.values()}) == 3
    assert grammars.begin(request(StructuredOutput.choice(["yes", "no"], after_text="x"))) is not None
    assert compiled == [YES_NO]


def test_the_grammars_used_last_are_kept(tokenizer: Tokenizer) -> None:
    grammars = StructuredOutputs(lambda: tokenizer, StructuredOutputConfig(grammar_cache_size=2))
    a, b, c = (StructuredOutput.regex(f"{letter}+") for letter in "abc")
    for output in (a, b, a, c):
        matcher(grammars, output)
    assert grammars.begin(request(a)) is not None
    assert grammars.begin(request(b)) is None


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (StructuredOutput.json_schema({"type": "objekt"}), "objekt"),
        (StructuredOutput.json_schema({"type": "object", "properties": [1]}), "properties must be an object"),
        (StructuredOutput.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (StructuredOutput.json_schema({"$ref": "#/$defs/nowhere"}), "nowhere"),
        (StructuredOutput.json_schema({"$ref": "https://example.com/schema.json"}), "example.com"),
        (StructuredOutput.json_schema({"$ref": "#"}), "no text"),
        (
            StructuredOutput.json_schema(
                {"$ref": "#/$defs/loop", "$defs": {"loop": {"allOf": [{"$ref": "#/$defs/loop"}]}}}
            ),
            "no text",
        ),
        (StructuredOutput.json_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "anyOf"),
        (StructuredOutput.regex("[a-"), "unclosed"),
        (StructuredOutput.regex("(?=a)b"), "look-ahead"),
        (StructuredOutput.grammar("nonsense"), "Expected token ':'"),
        (StructuredOutput.grammar("start: other"), "other"),
    ],
)
def test_a_bad_grammar_is_refused_with_the_reason_every_time(
    grammars: StructuredOutputs, output: StructuredOutput, reason: str
) -> None:  # C055 C057
    for _ in range(2):
        with pytest.raises(RequestError) as raised:
            matcher(grammars, output)
        assert raised.value.param == "structured_output"
        assert reason in raised.value.message
        assert len(raised.value.message) < 600 and "x-guidance" not in raised.value.message
    assert matcher(grammars, YES_NO) is not None


def test_a_grammar_that_is_too_large_is_not_looked_at(tokenizer: Tokenizer) -> None:
    grammars = StructuredOutputs(lambda: tokenizer, StructuredOutputConfig(max_grammar_size="1KiB"))
    with pytest.raises(RequestError, match="--max-grammar-size"):
        grammars.begin(request(StructuredOutput.regex("a" * 1025)))
    assert grammars.num_pending == 0
    matcher(grammars, StructuredOutput.regex("a" * 1000))


def chain(length: int) -> dict[str, Any]:
    links: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "integer"}}}


EXPLOSIVE: dict[str, Callable[[], StructuredOutput]] = {
    "chain of references": lambda: StructuredOutput.json_schema(chain(7000)),
    "chain of rules": lambda: StructuredOutput.grammar(
        "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(14_000)) + 'r14000: "a"'
    ),
    "brackets": lambda: StructuredOutput.grammar("start: " + "(" * 100_000 + '"a"' + ")" * 100_000),
    "nested repeats": lambda: StructuredOutput.regex("((a{0,300}){0,300}){0,300}b"),
    "many strings": lambda: StructuredOutput.json_schema({"enum": [f"s{i}" for i in range(20_000)]}),
    "ambiguous": lambda: StructuredOutput.regex("(a|a|aa)+"),
}


@pytest.mark.parametrize("name", EXPLOSIVE)
def test_an_explosive_grammar_is_served_or_refused(grammars: StructuredOutputs, name: str) -> None:  # C062
    """Some of these end a process whose compiler has the usual stack; here, nothing but the request may end."""
    try:
        found = matcher(grammars, EXPLOSIVE[name]())
    except RequestError:
        pass
    else:
        assert possible(grammars, found)[0] or found.error
    assert possible(grammars, matcher(grammars, YES_NO))


def test_an_ambiguous_grammar_ends_with_the_reason_before_its_masks_take_long(grammars: StructuredOutputs) -> None:
    found = matcher(grammars, StructuredOutput.grammar('start: e\ne: e e | e e e | "a" | '))  # C062
    text = ""
    while found.error is None:
        assert len(text) < 1000
        possible(grammars, found)
        text += "a"
        follow(found, text)
    assert "cannot go on" in found.error


def test_a_grammar_that_takes_too_long_is_given_up(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = StructuredOutputs(lambda: tokenizer, StructuredOutputConfig())
    matcher(grammars, YES_NO)
    monkeypatch.setattr(grammars, "_timeout", 0.2)
    done, compile_one = threading.Event(), grammars._compile
    monkeypatch.setattr(grammars, "_compile", lambda key: (done.wait(PATIENCE), compile_one(key))[1])
    slow = StructuredOutput.regex("slow")
    assert grammars.begin(request(slow)) is None
    reason = settle(grammars)["r"]
    assert isinstance(reason, RequestError) and "--grammar-timeout" in reason.message
    # Once it is there, it is there for the next one.
    monkeypatch.setattr(grammars, "_timeout", PATIENCE)
    assert grammars.begin(request(slow, "again")) is None
    done.set()
    assert isinstance(settle(grammars)["again"], Matcher)


def test_a_request_that_is_gone_hears_nothing(grammars: StructuredOutputs) -> None:
    grammars.begin(request(YES_NO, "gone"))
    grammars.begin(request(YES_NO, "here"))
    grammars.forget(["gone", "unknown"])
    assert set(settle(grammars)) == {"here"}


def test_a_tokenizer_that_cannot_be_loaded_fails_the_request(tmp_path: Path) -> None:
    def missing() -> Tokenizer:
        raise RequestError("there is no tokenizer", param="structured_output")

    grammars = StructuredOutputs(missing, StructuredOutputConfig())
    with pytest.raises(RequestError, match="no tokenizer"):
        matcher(grammars, YES_NO)


def test_beams_need_a_token_that_ends_them(grammars: StructuredOutputs) -> None:
    beam = BeamParams(width=2)
    asked = request(YES_NO, beam=beam)
    grammars.begin(asked)
    settle(grammars)
    endless = Request(
        request_id="e", prompt_token_ids=[9], sampling_params=asked.sampling_params, seed=0, eos_token_ids=()
    )
    with pytest.raises(RequestError, match="beam search"):
        grammars.begin(endless)
