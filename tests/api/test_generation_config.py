"""A model that brings sampling defaults, and a head that is longer than its tokenizer's vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.byte_tokenizer import BOS_ID, EOS_ID, IM_END_ID, VOCAB_SIZE
from tests.helpers.checkpoints import llama_config, random_tensors, write_checkpoint
from tests.helpers.server import ServerProcess, server_process
from tests.helpers.streams import check_error, check_stream, strict_json

MODEL_VOCAB_SIZE = VOCAB_SIZE + 64
DEFAULTS = {"temperature": 0.2, "top_k": 1, "repetition_penalty": 1.5}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    config = llama_config(vocab_size=MODEL_VOCAB_SIZE)
    tensors = random_tensors(config)
    tensors["lm_head.weight"][VOCAB_SIZE:] *= 50.0
    folder: Path = write_checkpoint(tmp_path_factory.mktemp("defaults"), config, tensors)
    ends = {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, IM_END_ID]}
    (folder / "generation_config.json").write_text(json.dumps({**ends, **DEFAULTS, "do_sample": True}))
    flags = ("--num-device-blocks", "200", "--num-threads", "1")
    with server_process(folder, *flags, log=tmp_path_factory.mktemp("log") / "defaults.log") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.base_url, timeout=60) as client:
        yield client


def texts(client: httpx.Client, **body: Any) -> list[str]:
    fixed = {"prompt": "one two one two", "max_tokens": 30, "ignore_eos": True}
    response = client.post("/v1/completions", json={**fixed, **body})
    assert response.status_code == 200, response.text
    return [choice["text"] for choice in strict_json(response.content)["choices"]]


def test_defaults_hold_unless_the_request_says_otherwise(client: httpx.Client, server: ServerProcess) -> None:
    """C041: a field of the request beats the model's default, one by one; a line of the log names the defaults."""
    own = texts(client, temperature=0, top_k=-1, repetition_penalty=1.5)
    assert [texts(client) for _ in range(3)] == [own] * 3
    assert len(set(texts(client, n=4))) == 1
    assert texts(client, repetition_penalty=1.0) == texts(client, temperature=0, repetition_penalty=1.0) != own
    assert texts(client, temperature=2) == own, "top_k 1 still holds"
    assert len(set(texts(client, temperature=2, top_k=-1, n=8))) >= 7
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
    answers = [client.post("/v1/chat/completions", json=chat).json()["choices"][0] for _ in range(3)]
    assert answers == [answers[0]] * 3
    lines = [line for line in server.output.splitlines() if "generation_config.json" in line]
    assert any(all(f"'{name}'" in line for name in DEFAULTS) for line in lines), lines


def test_ids_past_the_tokenizer_do_not_come_out(client: httpx.Client) -> None:
    """C042: the padded part of the head scores far above the rest; it is neither drawn nor reported."""
    fixed = {"prompt": "abc", "temperature": 1.5, "top_k": -1, "max_tokens": 12, "n": 16, "ignore_eos": True}
    for seed in range(4):
        body = {**fixed, "seed": seed, "logprobs": 5, "return_token_ids": True}
        for choice in strict_json(client.post("/v1/completions", json=body).content)["choices"]:
            assert max(choice["token_ids"]) < VOCAB_SIZE
            columns = choice["logprobs"]
            tokens = [*columns["tokens"], *(token for top in columns["top_logprobs"] for token in top)]
            assert all(isinstance(token, str) and token for token in tokens)
        stream = check_stream(client.post("/v1/completions", json={**body, "stream": True}).content, chat=False)
        assert sorted(stream.choices) == list(range(16))
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 20, "max_tokens": 5}
    [choice] = strict_json(client.post("/v1/chat/completions", json=body).content)["choices"]
    assert all(isinstance(t["token"], str) for e in choice["logprobs"]["content"] for t in (e, *e["top_logprobs"]))


def test_such_ids_may_stand_in_a_prompt(client: httpx.Client) -> None:
    """C071: the model has an embedding for them; what it has none for is a 400."""
    last = MODEL_VOCAB_SIZE - 1
    body = {"prompt": [BOS_ID, last, VOCAB_SIZE], "max_tokens": 2, "echo": True, "logprobs": 2}
    [choice] = strict_json(client.post("/v1/completions", json=body).content)["choices"]
    assert all(isinstance(token, str) for token in choice["logprobs"]["tokens"])
    check_error(client.post("/v1/completions", json={"prompt": [last + 1]}), 400, param="prompt")
    for name, value in (("stop_token_ids", [last]), ("allowed_token_ids", [last]), ("logit_bias", {str(last): 5})):
        check_error(client.post("/v1/completions", json={"prompt": "a", name: value}), 400, param=name)
