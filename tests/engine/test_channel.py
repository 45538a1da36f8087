from __future__ import annotations

import asyncio
import socket
import threading
import typing
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedserve.config import CacheConfig, EngineConfig, FrontConfig, ModelConfig, ServerConfig
from pagedserve.engine.async_channel import AsyncChannel
from pagedserve.engine.channel import (
    BlockingChannel,
    ChannelClosedError,
    ChannelFormatError,
    Codec,
    FrameReader,
)
from pagedserve.engine.core_spawn import socket_pair
from pagedserve.messages import (
    FROM_CORE,
    TO_CORE,
    AbortRequests,
    AddRequest,
    Call,
    CallResult,
    EngineCoreOutputs,
    FinishedRequest,
    Progress,
    Ready,
    SchedulerStats,
    Shutdown,
    StartCore,
    StartupFailed,
    StopSequences,
)
from pagedserve.sampling_params import BeamParams, SamplingParams, StructuredOutput
from pagedserve.sequence import Request
from pagedserve.step import KVCacheSpec, LayerGroup, MemoryPlan, TokenLogprobs

FULL_PARAMS = SamplingParams(
    n=2,
    best_of=3,
    max_tokens=7,
    min_tokens=1,
    temperature=0.5,
    top_p=0.9,
    top_k=2**62,
    seed=-5,
    stop=("a", "🦜"),
    stop_token_ids=(1, 2),
    logprobs=3,
    logit_bias={5: -1.5, 2**31: 2.0},
    allowed_token_ids=(4, 5),
    bad_words=("x",),
    bad_words_token_ids=((1, 2), (3,)),
    beam=BeamParams(width=3, early_stopping="never"),
    structured_output=StructuredOutput.json_schema({"const": "🦜"}, prefix="<", whitespace="", after_text="</think>"),
)
SPEC = KVCacheSpec(
    num_layers=2,
    num_kv_heads=1,
    head_dim=8,
    block_size=16,
    dtype="float32",
    bytes_per_block=2048,
    groups=(LayerGroup(layers=(1,)), LayerGroup(layers=(0,), window=9)),
)
PLAN = MemoryPlan(weights_bytes=1, kv_bytes=2, num_device_blocks=3, num_host_blocks=4, spec=SPEC)
ENTRY = TokenLogprobs(token_ids=[3, 1], logprobs=[-0.5, -1.0], rank=2)

TO_CORE_MESSAGES = [
    StartCore(config=EngineConfig(model=ModelConfig(model="m"), cache=CacheConfig(block_size=8)), vocab_limit=5),
    AddRequest(
        request=Request(
            request_id="r#1",
            prompt_token_ids=[1, 2, 3],
            sampling_params=FULL_PARAMS,
            seed=2**63 - 1,
            eos_token_ids=(2, 7),
            arrival_time=1.5,
            deadline=2.5,
            priority=-3,
            cache_salt="salt",
            read_prefix_cache=False,
        )
    ),
    AbortRequests(request_ids=["a", "b"]),
    StopSequences(request_ids=["a"], choice_indices=[1]),
    Call(call_id=1, method="ping"),
    Shutdown(),
]
FROM_CORE_MESSAGES = [
    EngineCoreOutputs(
        request_ids=["a"],
        choice_indices=[0],
        token_ids=[[1, 2]],
        finish_reasons=["stop"],
        stop_reasons=[7],
        cumulative_logprobs=[-0.25],
        logprobs={0: [ENTRY]},
        prompt_logprobs={"a": [ENTRY, ENTRY]},
        finished=[FinishedRequest(request_id="a", num_cached_tokens=16, first_scheduled_time=3.25)],
        stats=SchedulerStats(num_running=3, kv_cache_usage=0.5),
    ),
    Ready(plan=PLAN, max_model_len=512, phases={"loading weights": 0.5}),
    StartupFailed(kind="ConfigError", message="no"),
    Progress(phase="loading weights"),
    CallResult(call_id=1, value=True),
]


@pytest.fixture
def pair() -> Iterator[tuple[BlockingChannel, BlockingChannel]]:
    """The API's end and the core's end, both blocking."""
    ours, theirs = socket_pair()
    api = BlockingChannel(ours, Codec(sends=TO_CORE, receives=FROM_CORE))
    core = BlockingChannel(theirs, Codec(sends=FROM_CORE, receives=TO_CORE))
    yield api, core
    api.close()
    core.close()


def test_every_message_type_has_an_example_here() -> None:
    assert {type(m) for m in TO_CORE_MESSAGES} == set(TO_CORE)
    assert {type(m) for m in FROM_CORE_MESSAGES} == set(FROM_CORE)


@pytest.mark.parametrize("message", TO_CORE_MESSAGES, ids=lambda m: type(m).__name__)
def test_what_the_core_receives_is_what_was_sent(pair: typing.Any, message: object) -> None:
    api, core = pair
    api.send(message)
    assert core.receive() == message


@pytest.mark.parametrize("message", FROM_CORE_MESSAGES, ids=lambda m: type(m).__name__)
def test_what_the_front_receives_is_what_was_sent(pair: typing.Any, message: object) -> None:
    api, core = pair
    core.send(message)
    assert api.receive() == message


@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(1, 64))
def test_frames_survive_any_fragmentation(bodies: list[bytes], piece: int) -> None:
    codec = Codec(sends=(bytes,), receives=(bytes,))
    stream = b"".join(bytes(codec.encode(body)) for body in bodies)
    reader = FrameReader()
    frames = [frame for i in range(0, len(stream), piece) for frame in reader.feed(stream[i : i + piece])]
    assert [codec.decode(*frame) for frame in frames] == bodies


def test_a_message_larger_than_the_socket_buffer_arrives_whole(pair: typing.Any) -> None:
    api, core = pair
    prompt = list(range(2_000_000))
    request = Request(request_id="big", prompt_token_ids=prompt, sampling_params=SamplingParams(), seed=0)
    sender = threading.Thread(target=api.send, args=(AddRequest(request=request),))
    sender.start()
    assert core.receive().request.prompt_token_ids == prompt
    sender.join()


def test_messages_keep_their_order(pair: typing.Any) -> None:
    api, core = pair
    for call_id in range(1000):
        api.send(Call(call_id=call_id, method="ping"))
    assert [core.receive().call_id for _ in range(1000)] == list(range(1000))


def test_the_end_of_the_other_side_is_an_error_for_both_directions(pair: typing.Any) -> None:
    api, core = pair
    api.send(Shutdown())
    api.close()
    assert core.receive() == Shutdown()
    with pytest.raises(ChannelClosedError):
        core.receive()
    with pytest.raises(ChannelClosedError):
        core.send(Progress(phase="x"))


def test_a_field_of_the_wrong_type_is_refused() -> None:
    codec = Codec(sends=TO_CORE, receives=TO_CORE)
    body = msgspec.msgpack.encode({"call_id": "one", "method": "ping"})
    with pytest.raises(ChannelFormatError, match="call_id"):
        codec.decode(TO_CORE.index(Call), body)


def test_settings_out_of_range_are_refused_by_their_own_checks() -> None:
    codec = Codec(sends=TO_CORE, receives=TO_CORE)
    request = msgspec.to_builtins(TO_CORE_MESSAGES[1], str_keys=False)
    request["request"]["sampling_params"]["temperature"] = -1.0
    with pytest.raises(ChannelFormatError, match="temperature"):
        codec.decode(TO_CORE.index(AddRequest), msgspec.msgpack.encode(request))


def test_an_unknown_kind_and_an_absurd_length_are_refused() -> None:
    codec = Codec(sends=TO_CORE, receives=TO_CORE)
    with pytest.raises(ChannelFormatError):
        codec.decode(200, b"")
    with pytest.raises(ChannelFormatError):
        list(FrameReader().feed(b"\xff\xff\xff\xff\x00"))


def test_types_of_other_planes_do_not_pass() -> None:
    codec = Codec(sends=TO_CORE, receives=FROM_CORE)
    with pytest.raises(KeyError):
        codec.encode(ServerConfig())
    assert FrontConfig not in TO_CORE


async def _open(sock: socket.socket) -> tuple[AsyncChannel, asyncio.Queue[typing.Any], asyncio.Future[typing.Any]]:
    messages: asyncio.Queue[typing.Any] = asyncio.Queue()
    closed: asyncio.Future[typing.Any] = asyncio.get_running_loop().create_future()
    codec = Codec(sends=TO_CORE, receives=FROM_CORE)
    channel = await AsyncChannel.open(sock, codec, messages.put_nowait, closed.set_result)
    return channel, messages, closed


async def test_the_async_side_talks_to_the_blocking_side() -> None:
    ours, theirs = socket_pair()
    core = BlockingChannel(theirs, Codec(sends=FROM_CORE, receives=TO_CORE))
    channel, messages, closed = await _open(ours)
    for message in TO_CORE_MESSAGES:
        channel.send(message)
    assert [await asyncio.to_thread(core.receive) for _ in TO_CORE_MESSAGES] == TO_CORE_MESSAGES
    for message in FROM_CORE_MESSAGES:
        await asyncio.to_thread(core.send, message)
    assert [await messages.get() for _ in FROM_CORE_MESSAGES] == FROM_CORE_MESSAGES
    core.close()
    assert await closed is None
    assert not channel.is_open
    with pytest.raises(ChannelClosedError):
        channel.send(Shutdown())


async def test_the_async_side_takes_large_messages_both_ways() -> None:
    ours, theirs = socket_pair()
    core = BlockingChannel(theirs, Codec(sends=FROM_CORE, receives=TO_CORE))
    channel, messages, closed = await _open(ours)
    names = ["x" * 1000] * 5000
    channel.send(AbortRequests(request_ids=names))
    assert (await asyncio.to_thread(core.receive)).request_ids == names
    await asyncio.to_thread(core.send, EngineCoreOutputs(request_ids=names))
    assert (await messages.get()).request_ids == names
    channel.close()
    await closed
    core.close()


async def test_garbage_closes_the_channel_and_says_why() -> None:
    ours, theirs = socket_pair()
    channel, _, closed = await _open(ours)
    theirs.sendall(b"\x01\x00\x00\x00\x63\x00")
    assert isinstance(await closed, ChannelFormatError)
    assert not channel.is_open
    theirs.close()
