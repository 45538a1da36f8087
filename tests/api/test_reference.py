"""The README says what the code does, and so does the OpenAPI document."""

from __future__ import annotations

from pathlib import Path

from pagedserve.api import reference
from tests.api.conftest import Front

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_is_what_the_code_says() -> None:
    text = README.read_text(encoding="utf-8")
    assert text == reference.updated(text), "run: python -m pagedserve.api.reference README.md"


def test_every_route_says_what_it_answers(front: Front) -> None:
    document = front.client.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["description"], (method, path)
            assert set(operation["responses"]) == {"200", "default"}
            for response in operation["responses"].values():
                for kind, media in response["content"].items():
                    assert kind == "text/event-stream" or media["schema"], (method, path)
            if method == "post" and "{" not in path and path != "/reset_prefix_cache":
                assert operation["requestBody"]["required"]
    assert {"/v1/responses", "/v1/messages", "/v1/batches", "/v1/files"} <= set(document["paths"])
