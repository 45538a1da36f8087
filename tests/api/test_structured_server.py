"""Structured output through a real server: what the openai package makes of it, and that a bad grammar hurts nobody."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.helpers.checkpoints import tiny_llama
from tests.helpers.server import ServerProcess, server_process
from tests.helpers.streams import check_error, strict_json

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "celsius": {"type": "integer", "maximum": 60}},
    "required": ["city", "celsius"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
QUESTION = [{"role": "user", "content": "weather?"}]


class Step(BaseModel):
    kind: Literal["add", "drop"]
    amount: int = Field(ge=0, le=99)


class Plan(BaseModel):
    """Nested, with a list, an enum and an optional: what the package's helper makes a strict schema of."""

    steps: list[Step] = Field(max_length=2)
    note: Literal["short", "long"] | None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("structured")
    model = tiny_llama(folder / "model", seed=3, max_position_embeddings=4096)
    flags = ("--served-model-name", "tiny", "--num-device-blocks", "1500", "--num-threads", "1")
    with server_process(model, *flags, log=folder / "log") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.base_url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def sdk(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def chat(client: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"messages": QUESTION, "max_tokens": 300, "temperature": 1.0, "seed": 4, **fields}
    return client.post("/v1/chat/completions", json=body)


def test_parse_gives_the_pydantic_model(sdk: openai.OpenAI) -> None:
    for seed in range(3):
        answer = sdk.chat.completions.parse(
            model="tiny", messages=QUESTION, response_format=Plan, max_tokens=400, temperature=1.0, seed=seed
        )
        assert answer.choices[0].finish_reason == "stop"
        assert isinstance(answer.choices[0].message.parsed, Plan)


def test_a_stream_joins_to_the_whole_answer(sdk: openai.OpenAI, client: httpx.Client) -> None:
    whole = [c["message"]["content"] for c in strict_json(chat(client, response_format=FORMAT, n=3).content)["choices"]]
    texts = ["", "", ""]
    stream = sdk.chat.completions.create(
        model="tiny",
        messages=QUESTION,
        response_format=FORMAT,
        max_tokens=300,
        temperature=1.0,
        seed=4,
        n=3,
        stream=True,
    )  # type: ignore[call-overload]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == whole
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_completions_and_their_tokens(client: httpx.Client) -> None:  # C023
    body = {"prompt": ["a", "b"], "guided_choice": ["yes", "no"], "logprobs": 3, "max_tokens": 9}
    answer = strict_json(client.post("/v1/completions", json=body).content)
    for choice in answer["choices"]:
        assert choice["text"] in ("yes", "no")
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        assert all(-9999.0 <= value <= 0.0 for value in choice["logprobs"]["token_logprobs"])


def test_beams_over_http(client: httpx.Client) -> None:
    body = {"prompt": "a", "use_beam_search": True, "n": 3, "max_tokens": 200, "response_format": FORMAT}
    answer = strict_json(client.post("/v1/completions", json=body).content)
    assert len(answer["choices"]) == 3
    for choice in answer["choices"]:
        jsonschema.validate(json.loads(choice["text"]), SCHEMA)


BAD = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "objekt"}}}},
        "objekt",
    ),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"structured_outputs": {"regex": "[a-"}}, "unclosed"),
    ({"guided_grammar": "nonsense"}, "Expected"),
    ({"guided_json": {"$ref": "https://example.com/x"}}, "example.com"),
]


class Canary:
    """A stream that is read all the while; the longest time between two of its chunks."""

    def __init__(self, server: ServerProcess):
        self._url = f"{server.base_url}/v1/completions"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self.num_chunks = 0
        self.has_ended_well = False

    def __enter__(self) -> Canary:
        self._thread.start()
        limit = time.monotonic() + 60
        while not self.num_chunks and time.monotonic() < limit:
            time.sleep(0.01)
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _read(self) -> None:
        body = {"prompt": "canary", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", self._url, json=body, timeout=60) as response:
            for line in response.iter_lines():
                if line.startswith("data:"):
                    assert "error" not in line
                    self.num_chunks += 1
                if self._stop.is_set():
                    break
        self.has_ended_well = True


@pytest.mark.parametrize("stream", [False, True])
def test_bad_grammars_are_400_beside_a_healthy_stream(  # C055
    server: ServerProcess, client: httpx.Client, stream: bool
) -> None:
    with Canary(server) as canary:
        for fields, reason in BAD:
            error = check_error(chat(client, stream=stream, **fields), 400, param=next(iter(fields)))
            assert reason in error["message"]
        good = strict_json(chat(client, response_format=FORMAT).content)
        jsonschema.validate(json.loads(good["choices"][0]["message"]["content"]), SCHEMA)
    assert canary.has_ended_well


def test_explosive_grammars_hold_nobody_up(server: ServerProcess, client: httpx.Client) -> None:  # C062
    def arms(depth: int) -> dict[str, Any]:
        if not depth:
            return {"type": "string"}
        inner = [arms(depth - 1) for _ in range(3)]
        return {
            "oneOf": [
                {"type": "object", "properties": {f"k{i}": s}, "required": [f"k{i}"]} for i, s in enumerate(inner)
            ]
        }

    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(6000)}
    chain = {"$ref": "#/$defs/d0", "$defs": {**links, "d6000": {"type": "boolean"}}}
    fields: list[dict[str, Any]] = [
        {"guided_json": arms(8)},
        {"guided_json": chain},
        {"guided_regex": "((a{0,300}){0,300}){0,300}b"},
        {"guided_regex": "(a|a|aa)+$"},
        {"guided_json": {"enum": [f"string {i}" for i in range(20_000)]}},
        {"guided_grammar": 'start: e\ne: e e | e e e | "a" | '},
        {"guided_json": "[" * 5000},
    ]
    statuses: list[int] = []

    def send(some: dict[str, Any]) -> None:
        statuses.append(
            httpx.post(
                f"{server.base_url}/v1/completions", json={"prompt": "a", "max_tokens": 60, **some}, timeout=120
            ).status_code
        )

    with Canary(server) as canary:
        threads = [threading.Thread(target=send, args=(some,)) for some in fields]
        for thread in threads:
            thread.start()
        num_seen = canary.num_chunks
        while any(thread.is_alive() for thread in threads):
            assert client.get("/health").status_code == 200
            time.sleep(0.05)
        for thread in threads:
            thread.join()
        assert canary.num_chunks > num_seen
    assert canary.has_ended_well
    assert len(statuses) == len(fields) and set(statuses) <= {200, 400}
    assert server.process.poll() is None


def test_a_client_that_leaves_while_its_grammar_compiles(server: ServerProcess, client: httpx.Client) -> None:
    schema = {"enum": [f"another string {i}" for i in range(9_000)]}
    with pytest.raises(httpx.TimeoutException):
        client.post(
            "/v1/completions",
            json={"prompt": "a", "max_tokens": 400, "n": 8, "guided_json": schema},
            timeout=httpx.Timeout(60, read=0.02),
        )
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        text = client.get("/metrics").text
        lines = [
            line
            for line in text.splitlines()
            if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting"))
        ]
        if lines and all(float(line.rsplit(" ", 1)[1]) == 0 for line in lines):
            break
        time.sleep(0.05)
    else:
        pytest.fail(f"a request is left: {lines}")
    assert chat(client, response_format=FORMAT).status_code == 200
