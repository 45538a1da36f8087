from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedserve.engine.output_processor import OutputProcessor, RequestState
from pagedserve.engine.tokenizer import Tokenizer
from pagedserve.errors import EngineDeadError, EngineStepError, QueueFullError
from pagedserve.messages import AbortRequests, EngineCoreOutputs, FinishedRequest, StopSequences
from pagedserve.model_files import TOKENIZER_FILES, ModelFiles
from pagedserve.outputs import RequestOutput
from pagedserve.sampling_params import SamplingParams
from pagedserve.sequence import Request
from pagedserve.step import TokenLogprobs
from tests.helpers.byte_tokenizer import EOS_ID, byte_ids, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    files = ModelFiles(
        kind="safetensors",
        path=folder,
        name="bytes",
        config={},
        generation_config={},
        weight_files=(),
        tokenizer_files={name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()},
    )
    return Tokenizer.load(files)


_numbers = itertools.count()


def begin(processor: OutputProcessor, prompt: str = "Say", **params: Any) -> RequestState:
    name = f"r{next(_numbers)}"
    request = Request(
        request_id=name, prompt_token_ids=byte_ids(prompt), sampling_params=SamplingParams(**params), seed=0
    )
    return processor.add(request, prompt, name)


def row(
    state: RequestState, token_ids: list[int], *, choice: int = 0, end: str | None = None, **columns: Any
) -> EngineCoreOutputs:
    """The outputs of a step in which one choice got tokens, and ended where `end` says so."""
    name = state.request.request_id
    return EngineCoreOutputs(
        request_ids=[name],
        choice_indices=[choice],
        token_ids=[token_ids],
        finish_reasons=[end],
        stop_reasons=[columns.pop("stop_reason", None)],
        cumulative_logprobs=[columns.pop("cumulative_logprob", 0.0)],
        finished=[FinishedRequest(request_id=name)] if columns.pop("last", end is not None) else [],
        **columns,
    )


def entry(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_ids=[token_id, 9], logprobs=[-float(token_id), -1.0], rank=1)


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(alphabet="ab🦜éST\n ", max_size=40),
    data=st.data(),
    stop=st.sampled_from([(), ("ST",), ("zz",), ("🦜", "a\n")]),
    include=st.booleans(),
)
def test_deltas_joined_are_the_whole_however_often_one_looks(
    tokenizer: Tokenizer, text: str, data: st.DataObject, stop: tuple[str, ...], include: bool
) -> None:
    processor = OutputProcessor(tokenizer)
    state = begin(processor, stop=stop, include_stop_str_in_output=include, max_tokens=500, logprobs=1)
    ids = byte_ids(text)
    taken: list[RequestOutput] = []
    for i, token_id in enumerate(ids):
        processor.process(row(state, [token_id], logprobs={0: [entry(token_id)]}))
        if data.draw(st.booleans(), label=f"look after {i}"):
            taken.append(state.take())
        if state.choices[0].finish_reason:
            break
    processor.process(row(state, [], end="length"))
    taken.append(state.take())
    whole = taken[-1].outputs[0]
    assert "".join(t.outputs[0].delta_text for t in taken) == whole.text
    assert [i for t in taken for i in t.outputs[0].delta_token_ids] == whole.token_ids
    assert [e for t in taken for e in t.outputs[0].delta_logprobs or []] == whole.logprobs
    assert whole.logprobs == [entry(token_id) for token_id in whole.token_ids]
    first = (
        min((position, s) for s in stop if (position := text.find(s)) >= 0) if any(s in text for s in stop) else None
    )
    if first is None:
        assert (whole.text, whole.finish_reason, whole.token_ids) == (text, "length", ids)
    else:
        end = first[0] + (len(first[1]) if include else 0)
        assert (whole.text, whole.finish_reason, whole.stop_reason) == (text[:end], "stop", first[1])


def test_a_stop_string_ends_the_choice_before_the_core_knows(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    state = begin(processor, stop="END", max_tokens=50)
    processed = processor.process(row(state, byte_ids("foo EN")))
    assert processed.messages == []
    assert state.take().outputs[0].delta_text == "foo "
    processed = processor.process(row(state, byte_ids("D and more")))
    assert processed.messages == [StopSequences(request_ids=[state.request.request_id], choice_indices=[0])]
    output = state.take()
    assert not output.finished
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "END")
    assert output.outputs[0].token_ids == byte_ids("foo END")
    # What the core computed before it heard of it is dropped.
    processor.process(row(state, byte_ids("xyz")))
    processor.process(row(state, [], end="length"))
    last = state.take()
    assert last.finished
    assert last.outputs[0].text == "foo "
    assert last.outputs[0].finish_reason == "stop"
    assert last.outputs[0].delta_text == ""


def test_the_core_is_not_told_of_a_stop_that_it_ended_itself(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    state = begin(processor, stop="b", max_tokens=2)
    processed = processor.process(row(state, byte_ids("ab"), end="length"))
    assert processed.messages == []
    output = state.take()
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("a", "stop")


@pytest.mark.parametrize(("include", "text"), [(False, "hi"), (True, "hix")])
def test_the_token_that_ended_the_output_is_counted_but_not_shown(
    tokenizer: Tokenizer, include: bool, text: str
) -> None:
    processor = OutputProcessor(tokenizer)
    stop_id = byte_ids("x")[0]
    state = begin(processor, stop_token_ids=(stop_id,), include_stop_str_in_output=include)
    processor.process(row(state, byte_ids("hi")))
    processor.process(row(state, [stop_id], end="stop", stop_reason=stop_id))
    output = state.take()
    assert output.outputs[0].text == text
    assert output.outputs[0].token_ids == byte_ids("hix")
    assert output.outputs[0].stop_reason == stop_id


@pytest.mark.parametrize("skip", [True, False])
def test_eos_is_no_text(tokenizer: Tokenizer, skip: bool) -> None:
    processor = OutputProcessor(tokenizer)
    state = begin(processor, skip_special_tokens=skip)
    processor.process(row(state, [*byte_ids("hi"), EOS_ID], end="stop"))
    assert state.take().outputs[0].text == "hi"


def test_choices_end_each_on_its_own(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    state = begin(processor, n=2, stop="!")
    processor.process(row(state, byte_ids("a!"), choice=1))
    processor.process(row(state, byte_ids("b"), choice=0))
    first = state.take()
    assert [(c.index, c.text, c.finish_reason) for c in first.outputs] == [(0, "b", None), (1, "a", "stop")]
    processor.process(row(state, byte_ids("c"), choice=0, end="length"))
    last = state.take()
    assert [(c.text, c.delta_text, c.finish_reason) for c in last.outputs] == [("bc", "c", "length"), ("a", "", "stop")]
    assert last.finished


def test_best_of_shows_the_best_ones_and_only_at_the_end(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    state = begin(processor, n=2, best_of=3)
    scores = {0: -3.0, 1: -1.0, 2: -2.0}
    for choice, score in scores.items():
        text = byte_ids("ab")
        step = row(state, text, choice=choice, end="length", cumulative_logprob=score, last=choice == 2)
        assert bool(processor.process(step).changed) == (choice == 2)
    output = state.take()
    assert [(c.index, c.cumulative_logprob) for c in output.outputs] == [(0, -1.0), (1, -2.0)]


def test_prompt_logprobs_begin_with_none_and_come_in_pieces(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    state = begin(processor, "abcd", prompt_logprobs=1, max_tokens=0)
    name = state.request.request_id
    processor.process(EngineCoreOutputs(prompt_logprobs={name: [entry(1), entry(2)]}))
    processor.process(EngineCoreOutputs(prompt_logprobs={name: [entry(3)]}))
    processor.process(row(state, [], end="length"))
    output = state.take()
    assert output.prompt_logprobs == [None, entry(1), entry(2), entry(3)]
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [])


def test_facts_of_the_core_come_with_the_last_output(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    state = begin(processor)
    outputs = row(state, byte_ids("a"), end="stop")
    outputs.finished[0].num_cached_tokens = 16
    outputs.finished[0].num_preemptions = 2
    outputs.finished[0].num_wasted_tokens = 30
    outputs.finished[0].first_scheduled_time = 5.0
    processor.process(outputs)
    output = state.take()
    assert output.num_cached_tokens == 16
    assert output.metrics is not None
    assert (output.metrics.num_preemptions, output.metrics.num_wasted_tokens) == (2, 30)
    assert output.metrics.first_scheduled_time == 5.0
    assert output.metrics.finished_time is not None
    assert len(processor) == 0


@pytest.mark.parametrize(
    ("kind", "error"),
    [("QueueFullError", QueueFullError), ("EngineStepError", EngineStepError), ("Odd", EngineStepError)],
)
def test_an_error_of_the_core_becomes_its_exception(tokenizer: Tokenizer, kind: str, error: type[Exception]) -> None:
    processor = OutputProcessor(tokenizer)
    state = begin(processor)
    finished = FinishedRequest(request_id=state.request.request_id, error_kind=kind, error="full")
    processed = processor.process(EngineCoreOutputs(finished=[finished]))
    assert processed.changed == [state]
    assert type(state.error) is error
    output = state.take()
    assert (output.finished, output.error, output.outputs[0].finish_reason) == (True, "full", "error")


def test_rows_of_requests_that_are_gone_are_dropped(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    state = begin(processor)
    processor.remove(state.request.request_id)
    assert processor.process(row(state, byte_ids("a"), end="stop")).changed == []
    assert state.choices[0].token_ids == []


def test_an_output_that_breaks_costs_its_request_alone(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    processor = OutputProcessor(tokenizer)
    broken, sound = begin(processor), begin(processor)

    def fails(*_: Any) -> bool:
        raise ValueError("bad bytes")

    monkeypatch.setattr(broken.choices[0], "append", fails)
    step = row(broken, byte_ids("a"))
    other = row(sound, byte_ids("b"))
    for name in ("request_ids", "choice_indices", "token_ids", "finish_reasons", "stop_reasons", "cumulative_logprobs"):
        getattr(step, name).extend(getattr(other, name))
    with caplog.at_level("ERROR", logger="pagedserve"):
        processed = processor.process(step)
    assert processed.changed == [broken, sound]
    assert processed.messages == [AbortRequests(request_ids=[broken.request.request_id])]
    assert isinstance(broken.error, EngineStepError) and broken.is_finished
    assert sound.take().outputs[0].text == "b" and sound.error is None
    assert "bad bytes" in caplog.text


def test_all_fail_when_the_core_is_gone(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    states = [begin(processor) for _ in range(3)]
    assert processor.fail_all("gone") == states
    assert all(isinstance(state.error, EngineDeadError) and state.take().error == "gone" for state in states)
    # One exception object in many tasks would collect the traces of all of them.
    assert len({id(state.error) for state in states}) == 3
    assert len(processor) == 0
