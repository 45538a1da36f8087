"""Methods, paths, ids, and the small routes."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.api.conftest import Front, FrontFactory
from tests.helpers.streams import check_error


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/version", "/v1/models", "/v1/models/fake", "/metrics", "/docs"]
)
def test_get_and_head(front: Front, path: str) -> None:  # C099
    assert front.client.get(path).status_code == 200
    head = front.client.head(path)
    assert head.status_code == 200
    assert head.content == b""


@pytest.mark.parametrize(
    "path", ["/nothing", "/v1", "/v1/models/", "/v1/completions/", "//v1/completions", "/v1/models/x/y", "/V1/models"]
)
def test_unknown_paths_are_a_404(front: Front, path: str) -> None:  # C099
    check_error(front.client.get(front.base_url + path), 404)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/completions", {"POST"}),
        ("DELETE", "/v1/chat/completions", {"POST"}),
        ("PUT", "/tokenize", {"POST"}),
        ("POST", "/health", {"GET", "HEAD"}),
        ("POST", "/v1/models", {"GET", "HEAD"}),
        ("OPTIONS", "/v1/models", {"GET", "HEAD"}),
        ("PUT", "/v1/files", {"GET", "HEAD", "POST"}),
        ("POST", "/v1/files/x", {"GET", "HEAD", "DELETE"}),
    ],
)
def test_wrong_methods_are_told_the_right_ones(front: Front, method: str, path: str, allow: set[str]) -> None:  # C099
    response = front.client.request(method, path)
    check_error(response, 405)
    assert {name.strip() for name in response.headers["allow"].split(",")} == allow


def test_models_lists_every_name(make_front: FrontFactory) -> None:  # C098
    front = make_front(names=("org/big", "alias"))
    cards = front.client.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["org/big", "alias"]
    assert cards[0]["max_model_len"] == front.engine.max_model_len
    for name in ("org/big", "alias"):
        assert front.client.get(f"/v1/models/{name}").json()["id"] == name
        assert front.complete(model=name).json()["model"] == name
    assert front.complete().json()["model"] == "org/big"
    assert front.complete(model=None).json()["model"] == "org/big"
    for name in ("nope", "", "../x", "org"):
        error = check_error(front.complete(model=name), 404, param="model")
        assert error["code"] == "model_not_found"
        check_error(front.chat(model=name), 404, param="model")
        check_error(front.client.post("/tokenize", json={"prompt": "a", "model": name}), 404, param="model")


def test_health_says_what_is_wrong(make_front: FrontFactory) -> None:
    front = make_front()
    front.engine.complaint = "the engine core has not answered for 61 s"
    error = check_error(front.client.get("/health"), 503)
    assert "61 s" in error["message"]
    assert check_error(front.client.get("/ready"), 503) == error
    front.engine.complaint = None
    assert front.client.get("/health").status_code == 200


def test_while_the_model_loads(make_front: FrontFactory) -> None:
    front = make_front()
    engine, front.state.engine = front.state.engine, None
    front.state.phase = "loading weights"
    for path in ("/health", "/ready"):
        response = front.client.get(path)
        assert "loading weights" in check_error(response, 503)["message"]
        assert int(response.headers["retry-after"]) > 0
    check_error(front.complete(), 503)
    check_error(front.chat(stream=True), 503)
    assert front.client.get("/v1/models").status_code == 200
    assert front.client.get("/version").status_code == 200
    front.state.engine = engine
    assert front.complete().status_code == 200


def test_while_the_server_drains(make_front: FrontFactory) -> None:
    front = make_front()
    front.state.is_draining = True
    assert front.client.get("/health").status_code == 200
    check_error(front.client.get("/ready"), 503)
    check_error(front.complete(), 503)


def test_a_dead_engine_is_a_503(make_front: FrontFactory) -> None:
    front = make_front()
    front.engine.is_dead = True
    check_error(front.complete(), 503)
    check_error(front.client.get("/ready"), 503)


@pytest.mark.parametrize(
    ("sent", "is_echoed"),
    [("abc-1.2_3", True), ("a" * 128, True), ("a" * 129, False), ("x" * 60_000, False), ("a b", False), ("é", False)],
    ids=lambda value: str(value)[:12],
)
def test_request_ids_are_echoed_where_harmless(front: Front, sent: str, is_echoed: bool) -> None:  # C100
    response = front.client.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": sent.encode()})
    assert response.status_code == 200
    echoed = response.headers["x-request-id"]
    assert (echoed == sent) == is_echoed
    assert (response.json()["id"] == f"cmpl-{sent}") == is_echoed
    assert re.fullmatch(r"[A-Za-z0-9._:+=-]{1,128}", echoed)


def test_ids_of_answers(front: Front) -> None:
    assert re.fullmatch(r"cmpl-[0-9a-f]{32}", front.complete().json()["id"])
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", front.chat().json()["id"])
    assert front.chat(request_id="mine").json()["id"] == "chatcmpl-mine"
    assert front.complete().json()["id"] != front.complete().json()["id"]


def test_equal_request_ids_do_not_meet_in_the_engine(front: Front) -> None:  # C100
    front.engine.seen.clear()
    for _ in range(2):
        assert front.complete(request_id="same", prompt=["a", "b"]).status_code == 200
    ids = [seen["request_id"] for seen in front.engine.seen]
    assert len(set(ids)) == 4
    assert all(name.startswith("same") for name in ids)


def test_tokenize_and_detokenize(front: Front) -> None:  # C067
    answer = front.client.post("/tokenize", json={"prompt": "the thing", "return_token_strs": True}).json()
    tokenizer = front.engine.tokenizer
    assert answer["tokens"] == tokenizer.encode("the thing")
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == front.engine.max_model_len
    assert "".join(answer["token_strs"]) == "<s>the thing"
    for text in ("", "plain", "žluťoučký 🦜\n", "\u0000\ufeff", "👩‍👩‍👧‍👦" * 300):
        ids = front.client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
        assert front.client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}
    conversation = [{"role": "user", "content": "hi"}]
    ids = front.client.post("/tokenize", json={"messages": conversation}).json()["tokens"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == front.engine.chat_template.render(conversation)
    assert len(ids) == front.chat(messages=conversation).json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize("tokens", [[-1], [320], [2**40], [2**70], ["a"], [1.5], [True], "x", None, {}])
def test_detokenize_refuses_what_is_no_id(front: Front, tokens: object) -> None:  # C067, C071
    check_error(front.client.post("/detokenize", json={"tokens": tokens}), 400, param="tokens")


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": []}, {"messages": []}, {"prompt": 5}])
def test_tokenize_refuses(front: Front, body: dict[str, object]) -> None:  # C067
    check_error(front.client.post("/tokenize", json=body), 400)


def test_reset_prefix_cache(front: Front) -> None:
    assert front.client.post("/reset_prefix_cache").json() == {"reset": True}


def test_metrics_parse_and_count_requests(make_front: FrontFactory) -> None:  # C115
    front = make_front(names=('we"ird\\name\n',))
    for _ in range(3):
        front.complete()
    front.client.get("/nothing/at/all")
    families = {f.name: f for f in text_string_to_metric_families(front.client.get("/metrics").text)}
    labels = {sample.labels["model_name"] for sample in families["vllm:num_requests_running"].samples}
    assert labels == {'we"ird\\name\n'}
    counts = {
        (s.labels["handler"], s.labels["status"]): s.value
        for s in families["http_requests"].samples
        if s.name == "http_requests_total"
    }
    assert counts[("/v1/completions", "2xx")] == 3
    assert counts[("none", "4xx")] == 1


def test_the_documents_are_complete_and_load_nothing_from_outside(front: Front) -> None:
    page = front.client.get("/docs").text
    assert not re.findall(r"https?://", page)
    document = front.client.get("/openapi.json").json()
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models", "/health"):
        assert path in document["paths"]
        assert path in page
    assert "repetition_penalty" in page
    schemas = document["components"]["schemas"]
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', front.client.get("/openapi.json").text))
    assert references <= set(schemas)
    assert schemas["CompletionRequest"]["required"] == ["prompt"]
