"""API keys guard every route there is, whoever adds it; health and ready stay open."""

from __future__ import annotations

import httpx
import pytest
from fastapi.routing import APIRoute

from pagedserve.api.auth import OPEN_PATHS
from pagedserve.api.routes import ROUTERS
from tests.api.conftest import Front, FrontFactory
from tests.helpers.streams import check_error

KEY = "sécret-1"
OTHER_KEY = "secret-2"
ROUTES = [
    (method, route.path.replace("{name:path}", "fake"))
    for router in ROUTERS
    for route in router.routes
    if isinstance(route, APIRoute)
    for method in route.methods
] + [("GET", "/openapi.json"), ("GET", "/nothing/here")]


@pytest.fixture(scope="module")
def guarded(make_front: FrontFactory) -> Front:
    return make_front(api_key=(KEY, OTHER_KEY))


def with_key(key: str) -> dict[str, bytes]:
    return {"Authorization": f"Bearer {key}".encode()}


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_needs_a_key(guarded: Front, method: str, path: str) -> None:  # C105
    response = guarded.client.request(method, path, json={} if method == "POST" else None)
    if path in OPEN_PATHS:
        assert response.status_code == 200
        return
    check_error(response, 401)
    assert response.headers["www-authenticate"] == "Bearer"
    assert "x-request-id" in response.headers
    allowed = guarded.client.request(method, path, json={} if method == "POST" else None, headers=with_key(KEY))
    assert allowed.status_code != 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (with_key(KEY), 200),
        (with_key(OTHER_KEY), 200),
        ({"Authorization": f"bearer {OTHER_KEY}"}, 200),
        ({"Authorization": f"BEARER   {OTHER_KEY}"}, 200),
        ({"x-api-key": OTHER_KEY}, 200),
        ({}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": f"Bearer {OTHER_KEY}x"}, 401),
        ({"Authorization": f"Bearer {OTHER_KEY[:-1]}"}, 401),
        ({"Authorization": f"Basic {OTHER_KEY}"}, 401),
        ({"Authorization": OTHER_KEY}, 401),
        ({"Authorization": f"Bearer {OTHER_KEY.upper()}"}, 401),
        ({"x-api-key": ""}, 401),
        ({"api-key": OTHER_KEY}, 401),
    ],
    ids=str,
)
def test_which_headers_carry_a_key(guarded: Front, headers: dict[str, str], status: int) -> None:  # C105
    assert guarded.client.get("/v1/models", headers=headers).status_code == status


@pytest.mark.parametrize(
    "path",
    ["//v1/models", "/V1/models", "/v1/../v1/models", "/v1%2fmodels", "/health/../v1/models", "/health/", "/x/health"],
)
def test_no_spelling_of_a_path_is_open(guarded: Front, path: str) -> None:  # C105
    # A raw URL: httpx would tidy it up.
    host = httpx.URL(guarded.base_url)
    request = httpx.Request("GET", guarded.base_url)
    request.url = host.copy_with(raw_path=path.encode())
    assert guarded.client.send(request).status_code == 401


def test_keys_of_the_environment_count_too(make_front: FrontFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDSERVE_API_KEY", "from-env,another")
    front = make_front(api_key=("flag",))
    for key in ("from-env", "another", "flag"):
        assert front.client.get("/v1/models", headers=with_key(key)).status_code == 200
    assert front.client.get("/v1/models", headers=with_key("from-env,another")).status_code == 401


def test_a_preflight_needs_no_key_but_the_call_does(make_front: FrontFactory) -> None:  # C099
    front = make_front(api_key=(OTHER_KEY,), allowed_origins=("http://a.example",))
    asked = {
        "Origin": "http://a.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    response = front.client.options("/v1/chat/completions", headers=asked)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "http://a.example"
    assert "authorization" in response.headers["access-control-allow-headers"].lower()
    refused = front.client.post("/v1/chat/completions", json={}, headers={"Origin": "http://a.example"})
    check_error(refused, 401)
    assert refused.headers["access-control-allow-origin"] == "http://a.example"
    stranger = front.client.options("/v1/chat/completions", headers={**asked, "Origin": "http://b.example"})
    assert "access-control-allow-origin" not in stranger.headers


def test_cors_reaches_errors_and_streams_and_never_allows_credentials(make_front: FrontFactory) -> None:  # C099
    front = make_front(allowed_origins=("*",))
    origin = {"Origin": "http://a.example"}
    for response in (
        front.client.get("/nothing", headers=origin),
        front.client.post("/v1/completions", json={"prompt": "a", "stream": True}, headers=origin),
    ):
        assert response.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in response.headers


def test_no_cors_unless_asked_for(front: Front) -> None:
    response = front.client.get("/v1/models", headers={"Origin": "http://a.example"})
    assert not [name for name in response.headers if name.startswith("access-control")]
