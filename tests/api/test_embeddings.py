"""`/v1/embeddings`, `/v1/score` and `/v1/rerank` through a real socket, against transformers' hidden states."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModel

from tests.helpers.byte_tokenizer import BOS_ID, VOCAB_SIZE
from tests.helpers.server import ServerProcess

HIDDEN = 64
TEXTS = ["one", "a second text", "ü", "three " * 20, "a second text", "z"]


@pytest.fixture(scope="module")
def client(tiny: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny.base_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def http(tiny: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny.base_url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    return AutoModel.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager")


@torch.inference_mode()
def last_token(reference: Any, ids: list[int], dimensions: int | None = None) -> np.ndarray:
    vector = reference(input_ids=torch.tensor([ids])).last_hidden_state[0, -1, :dimensions]
    return (vector / vector.norm()).numpy()


def ids_of(http: httpx.Client, text: str) -> list[int]:
    return http.post("/tokenize", json={"prompt": text}).json()["tokens"]


def vectors(http: httpx.Client, **body: Any) -> list[list[float]]:
    response = http.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    return [entry["embedding"] for entry in response.json()["data"]]


def refusal(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_the_official_client_gets_the_same_numbers_in_both_encodings(
    client: openai.OpenAI, http: httpx.Client, reference: Any
) -> None:  # C120
    """The client asks for base64 by default, and decodes it as fp32."""
    text = "The sky is"
    packed = client.embeddings.create(model="tiny", input=text)
    plain = client.embeddings.create(model="tiny", input=text, encoding_format="float")
    raw = http.post("/v1/embeddings", json={"input": text, "encoding_format": "base64"}).json()
    absent = http.post("/v1/embeddings", json={"input": text, "user": "me"})
    decoded = np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4")
    assert packed.data[0].embedding == plain.data[0].embedding == decoded.tolist()
    assert absent.json()["data"][0]["embedding"] == decoded.tolist()
    assert "x-pagedserve-warning" not in absent.headers
    assert len(decoded) == HIDDEN
    ids = ids_of(http, text)
    np.testing.assert_allclose(decoded, last_token(reference, ids), atol=2e-5)
    assert abs(np.linalg.norm(decoded) - 1) < 1e-6
    assert (plain.object, plain.model, plain.data[0].object, plain.data[0].index) == ("list", "tiny", "embedding", 0)
    assert plain.usage.prompt_tokens == plain.usage.total_tokens == len(ids)


def test_leading_numbers_are_scaled_anew(client: openai.OpenAI, http: httpx.Client, reference: Any) -> None:  # C120
    found = client.embeddings.create(model="tiny", input="The sky is", dimensions=8).data[0].embedding
    np.testing.assert_allclose(found, last_token(reference, ids_of(http, "The sky is"), 8), atol=2e-5)
    error = refusal(http, "/v1/embeddings", {"input": "x", "dimensions": HIDDEN + 1})
    assert (error["param"], error["message"]) == (
        "dimensions", f"dimensions is {HIDDEN + 1}; this model's embeddings have {HIDDEN} numbers",
    )  # fmt: skip
    (raw,) = vectors(http, input="The sky is", normalize=False)
    (whole,) = vectors(http, input="The sky is")
    np.testing.assert_allclose(np.array(raw) / np.linalg.norm(raw), whole, atol=1e-6)
    assert abs(np.linalg.norm(raw) - 1) > 1e-3
    assert vectors(http, input="The sky is", use_activation=False, embed_dtype="float32") == [raw]


def test_batches_keep_their_order_and_each_vector_the_bits_it_has_alone(http: httpx.Client) -> None:  # C121
    texts = TEXTS + ["x" * length for length in range(1, 60)]
    response = http.post("/v1/embeddings", json={"input": texts}).json()
    assert [entry["index"] for entry in response["data"]] == list(range(len(texts)))
    together = [entry["embedding"] for entry in response["data"]]
    for i in (0, 1, 2, 3, 5, 40):
        assert vectors(http, input=texts[i]) == [together[i]]
    assert together[1] == together[4] != together[0]
    assert response["usage"]["prompt_tokens"] == sum(len(ids_of(http, text)) for text in texts)


def test_ids_are_taken_as_they_are(http: httpx.Client, reference: Any) -> None:  # C121
    (one,) = vectors(http, input=[BOS_ID, 40, 41])
    several = vectors(http, input=[[BOS_ID, 40, 41], [40]])
    assert several[0] == one
    np.testing.assert_allclose(several[1], last_token(reference, [40]), atol=2e-5)
    assert vectors(http, input=ids_of(http, "one"))[0] == vectors(http, input="one")[0]
    assert vectors(http, input="one", add_special_tokens=False) == vectors(http, input=ids_of(http, "one")[1:])


def test_texts_are_cut_only_where_that_is_asked_for(http: httpx.Client) -> None:  # C121
    ids = list(range(40, 60))
    assert vectors(http, input=ids, truncate_prompt_tokens=5) == vectors(http, input=ids[:5])
    assert vectors(http, input=ids, truncate_prompt_tokens=5, truncation_side="left") == vectors(http, input=ids[-5:])
    long = "x" * 600
    error = refusal(http, "/v1/embeddings", {"input": ["short", long]})
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert "601 tokens; this model takes 512" in error["message"]
    assert vectors(http, input=long, truncate_prompt_tokens=-1) == vectors(http, input=ids_of(http, long)[:512])


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "input"),
        ({"input": ""}, "input", "empty text"),
        ({"input": ["a", ""]}, "input", "empty text"),
        ({"input": []}, "input", "list of strings"),
        ({"input": [[1], []]}, "input", "empty text"),
        ({"input": ["a", 1]}, "input", "one kind only"),
        ({"input": [1, True]}, "input", "one kind only"),
        ({"input": 5}, "input", "must be a string"),
        ({"input": {"text": "a"}}, "input", "must be a string"),
        ({"input": [VOCAB_SIZE]}, "input", f"token ids are integers from 0 to {VOCAB_SIZE - 1}"),
        ({"input": [[40], [-1]]}, "input", "token ids are integers"),
        ({"input": ["a"] * 2049}, "input", "at most 2048 texts"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", '"float" or "base64"'),
        ({"input": "a", "dimensions": 0}, "dimensions", "between 1 and"),
        ({"input": "a", "dimensions": "8"}, "dimensions", "dimensions"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype", "float32"),
        ({"input": "a", "endianness": "big"}, "endianness", "little"),
        ({"input": "a", "normalize": True, "use_activation": False}, "use_activation", "one setting"),
        ({"input": "a", "truncation_side": "left"}, "truncation_side", "needs truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"input": "a", "priority": 5}, "priority", "--scheduling-policy priority"),
    ],
)
def test_wrong_inputs_are_named(http: httpx.Client, body: dict[str, Any], param: str, message: str) -> None:  # C121
    error = refusal(http, "/v1/embeddings", body)
    assert error["param"] == param
    assert message in error["message"]


def test_an_unknown_model_is_a_404_and_an_unknown_field_is_named(http: httpx.Client) -> None:
    assert http.post("/v1/embeddings", json={"input": "a", "model": "nope"}).status_code == 404
    response = http.post("/v1/embeddings", json={"input": "a", "input_type": "query"})
    assert response.status_code == 200
    assert "input_type" in response.headers["x-pagedserve-warning"]


def test_more_texts_than_the_queue_holds_and_generation_beside_them(http: httpx.Client, client: openai.OpenAI) -> None:
    texts = [f"{i % 300} text" for i in range(2000)]
    fixed = {"model": "tiny", "prompt": "Once", "max_tokens": 40, "temperature": 0, "extra_body": {"ignore_eos": True}}
    alone = client.completions.create(**fixed).choices[0].text

    async def both() -> tuple[Any, list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", timeout=60) as other:
            embedding = asyncio.create_task(other.embeddings.create(model="tiny", input=texts))
            answers = [await other.completions.create(**fixed) for _ in range(3)]
            return await embedding, [answer.choices[0].text for answer in answers]

    found, answers = asyncio.run(both())
    assert answers == [alone] * 3
    assert [entry.index for entry in found.data] == list(range(2000))
    assert found.data[7].embedding == found.data[307].embedding == vectors(http, input="7 text")[0]


def test_a_client_that_leaves_gives_everything_back(http: httpx.Client) -> None:
    body = json.dumps({"input": [f"{i} " + "x" * 400 for i in range(1000)]}).encode()
    head = (
        "POST /v1/embeddings HTTP/1.1\r\nHost: tiny\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    with socket.create_connection((http.base_url.host, http.base_url.port), timeout=60) as raw:
        raw.sendall(head + body)
        until(lambda: gauges(http) > [0.0, 0.0, 0.0])
    until(lambda: gauges(http) == [0.0, 0.0, 0.0])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gauges(http: httpx.Client) -> list[float]:
    page = http.get("/metrics").text
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    values = {s.name: s.value for family in text_string_to_metric_families(page) for s in family.samples}
    return [values[name] for name in names]


# -- scores and ranks -------------------------------------------------------------------------------------------------


def cosine(http: httpx.Client, first: str, second: str) -> float:
    left, right = (np.array(vector) for vector in vectors(http, input=[first, second]))
    return float(left @ right)


def test_scores_are_cosines(http: httpx.Client) -> None:
    one = http.post("/v1/score", json={"model": "tiny", "text_1": "one", "text_2": ["one", "two", "a third"]}).json()
    assert [entry["index"] for entry in one["data"]] == [0, 1, 2]
    wanted = [cosine(http, "one", text) for text in ("one", "two", "a third")]
    np.testing.assert_allclose([entry["score"] for entry in one["data"]], wanted, atol=1e-6)
    assert 1 - 1e-6 < one["data"][0]["score"] <= 1
    assert (one["object"], one["model"]) == ("list", "tiny")
    pairs = http.post("/score", json={"text_1": ["one", "a"], "text_2": ["two", "b"]}).json()["data"]
    wanted = [cosine(http, "one", "two"), cosine(http, "a", "b")]
    np.testing.assert_allclose([entry["score"] for entry in pairs], wanted, atol=1e-6)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_are_ordered_by_their_cosine(http: httpx.Client, path: str) -> None:
    documents = ["far away", "the query", {"text": "the query itself"}, "zzz"]
    body = {"query": "the query", "documents": documents}
    answer = http.post(path, json=body).json()
    texts = [document if isinstance(document, str) else document["text"] for document in documents]
    wanted = {i: cosine(http, "the query", text) for i, text in enumerate(texts)}
    assert [result["index"] for result in answer["results"]] == sorted(wanted, key=lambda i: -wanted[i])
    for result in answer["results"]:
        assert abs(result["relevance_score"] - wanted[result["index"]]) < 1e-6
        assert result["document"] == {"text": texts[result["index"]]}
    assert answer["results"][0]["index"] == 1
    assert answer["usage"]["total_tokens"] == sum(len(ids_of(http, text)) for text in ["the query", *texts])
    best = http.post(path, json={**body, "top_n": 2, "return_documents": False}).json()["results"]
    assert best == [{k: r[k] for k in ("index", "relevance_score")} for r in answer["results"][:2]]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/score", {"text_1": "a"}, "text_2", "text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "text_1 has 2 texts and text_2 has 1"),
        ("/v1/score", {"text_1": "", "text_2": "b"}, "text_1", "empty text"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2", "non-empty list"),
        ("/v1/rerank", {"query": "a"}, "documents", "documents"),
        ("/v1/rerank", {"query": "a", "documents": "b"}, "documents", "list of texts"),
        ("/v1/rerank", {"query": "a", "documents": ["b", 5]}, "documents", "list of texts"),
        ("/v1/rerank", {"query": "a", "documents": [{"image": "b"}]}, "documents", "list of texts"),
        ("/v1/rerank", {"query": ["a"], "documents": ["b"]}, "query", "query"),
        ("/v1/rerank", {"query": "a", "documents": ["b" * 600]}, "documents", "this model takes 512"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "top_n"),
    ],
)
def test_wrong_texts_are_named(http: httpx.Client, path: str, body: dict[str, Any], param: str, message: str) -> None:
    error = refusal(http, path, body)
    assert error["param"] == param
    assert message in error["message"]


def test_the_document_describes_them(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    assert {"/v1/embeddings", "/v1/score", "/v1/rerank"} <= set(document["paths"])
    assert "EmbeddingResponse" in json.dumps(document["paths"]["/v1/embeddings"])
