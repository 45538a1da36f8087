"""Texts of megabytes are refused before they are tokenized, where they would be cut and where they would be counted."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.conftest import Front
from tests.helpers.streams import check_error

TEXT = "x y " * 500_000
CHAT = [{"role": "user", "content": TEXT}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": TEXT}, "prompt"),
        ("/v1/completions", {"prompt": TEXT, "truncate_prompt_tokens": 5}, "prompt"),
        ("/v1/completions", {"prompt": ["a", TEXT], "add_special_tokens": False}, "prompt"),
        ("/v1/chat/completions", {"messages": CHAT}, "messages"),
        ("/v1/chat/completions", {"messages": CHAT, "truncate_prompt_tokens": 5}, "messages"),
        ("/tokenize", {"prompt": TEXT}, "prompt"),
        ("/tokenize", {"messages": CHAT}, "messages"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_megabytes_of_text_are_refused_with_the_limit(
    front: Front, path: str, body: dict[str, Any], param: str
) -> None:
    """C107: the message says how much is too much."""
    error = check_error(front.client.post(path, json=body), 400, param=param)
    assert error["code"] == "context_length_exceeded"
    assert "2000" in error["message"]
    assert front.complete().status_code == 200


def test_long_texts_that_are_cut_or_counted_are_served(front: Front) -> None:
    text = "the thing " * 20_000
    tokens = front.client.post("/tokenize", json={"prompt": text}).json()
    assert tokens["count"] > 50_000
    cut = front.complete(prompt=text, truncate_prompt_tokens=7, max_tokens=1)
    assert cut.json()["usage"]["prompt_tokens"] == 7
