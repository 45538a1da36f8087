from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pagedserve.engine.llm import make_config
from pagedserve.engine.llm_engine import LLMEngine
from pagedserve.errors import EngineDeadError, RequestError
from pagedserve.outputs import RequestOutput
from pagedserve.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[LLMEngine]:
    engine = LLMEngine(make_config(model=str(tiny_model), num_device_blocks=100, num_threads=1))
    yield engine
    engine.shutdown()


def run(engine: LLMEngine) -> list[RequestOutput]:
    outputs = []
    while engine.num_unfinished_requests:
        outputs += engine.step()
    return outputs


def test_requests_join_while_others_run_and_stream_their_tokens(engine: LLMEngine) -> None:
    first = engine.add_request("hello", GREEDY)
    outputs = engine.step() + engine.step()
    second = engine.add_request([5, 6, 7], GREEDY)
    outputs += run(engine)
    for name in (first, second):
        mine = [output.outputs[0] for output in outputs if output.request_id == name]
        assert [i for choice in mine for i in choice.delta_token_ids] == mine[-1].token_ids
        assert "".join(choice.delta_text for choice in mine) == mine[-1].text
        assert len(mine) == len(mine[-1].token_ids) == 6
    assert engine.step() == []


def test_an_aborted_request_gives_what_it_has_and_frees_its_blocks(engine: LLMEngine) -> None:
    name = engine.add_request("hello", GREEDY.with_(max_tokens=200))
    engine.step()
    engine.step()
    output = engine.abort(name)
    assert output is not None and output.finished
    assert len(output.outputs[0].token_ids) == 2
    assert engine.abort(name) is None
    engine.step()
    assert engine.stats.kv_cache_usage == 0.0
    engine.client.core.check()


def test_what_was_only_prepared_costs_nothing(engine: LLMEngine) -> None:
    with pytest.raises(RequestError):
        engine.prepare([], GREEDY)
    prepared = engine.prepare("hello", GREEDY)
    assert engine.num_unfinished_requests == 0
    engine.submit(prepared)
    assert run(engine)[-1].finished


def test_the_prefix_cache_can_be_forgotten(engine: LLMEngine) -> None:
    prompt = [5 + i for i in range(40)]
    for expected in (0, 39):
        engine.add_request(prompt, GREEDY)
        assert run(engine)[-1].num_cached_tokens == expected
    assert engine.reset_prefix_cache()
    engine.add_request(prompt, GREEDY)
    assert run(engine)[-1].num_cached_tokens == 0


def test_a_salt_keeps_prefixes_apart(engine: LLMEngine) -> None:
    prompt = [5 + i for i in range(40)]
    for salt, expected in ((None, 0), ("a", 0), ("b", 0), ("a", 39)):
        engine.add_request(prompt, GREEDY, cache_salt=salt)
        assert run(engine)[-1].num_cached_tokens == expected


def test_requests_that_the_core_lost_do_not_hang_the_caller(engine: LLMEngine) -> None:
    name = engine.add_request("hello", GREEDY)
    engine.client.core.scheduler.abort([name])
    engine.client.receive()
    with pytest.raises(EngineDeadError, match="1 requests wait"):
        for _ in range(5):
            engine.step()
