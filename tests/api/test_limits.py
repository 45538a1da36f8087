"""Ordinary fields in extraordinary amounts: a 400 that states the limit, and a log that does not grow."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.api.conftest import Front, FrontFactory
from tests.helpers.streams import check_error

USER = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("path", "body", "param", "limit"),
    [
        ("/v1/completions", {"prompt": ["a"] * 1024, "n": 64}, "n", "8192"),
        ("/v1/completions", {"prompt": ["a"] * 1024, "best_of": 64}, "best_of", "8192"),
        ("/v1/completions", {"prompt": ["a"] * 1025}, "prompt", "1024"),
        ("/v1/completions", {"prompt": "a", "bad_words": ["w" * 100_000]}, "bad_words", "256"),
        ("/v1/completions", {"prompt": "a", "bad_words": ["w"] * 257}, "bad_words", "256"),
        ("/v1/completions", {"prompt": "a", "stop": ["w"] * 17}, "stop", "16"),
        ("/v1/completions", {"prompt": "a", "stop": "w" * 5000}, "stop", "4096"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [5] * 10_000}, "stop_token_ids", "4096"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "1024"),
        ("/v1/completions", {"prompt": "a", "n": 257}, "n", "256"),
        ("/v1/chat/completions", {"messages": USER * 10_001}, "messages", "10000"),
        ("/v1/chat/completions", {"messages": USER, "tools": [{"type": "function"}] * 5000}, "tools", "tools"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_amounts_above_a_limit_are_refused_with_it(
    front: Front, path: str, body: dict[str, Any], param: str, limit: str
) -> None:
    """C107."""
    front.engine.seen.clear()
    error = check_error(front.client.post(path, json=body), 400, param=param)
    assert limit in error["message"]
    assert front.engine.seen == [], "refused before the engine hears of it"


def test_names_that_clients_invent_do_not_fill_the_log(
    make_front: FrontFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """C107: each is named once, some of a request; then no more are remembered."""
    front = make_front()
    with caplog.at_level(logging.WARNING, logger="pagedserve"):
        for round_ in range(100):
            names = {f"{round_}-{i}": 1 for i in range(500)}
            response = front.complete(**names, **{"x" * 10_000: 1})
            assert response.status_code == 200
            assert len(response.headers["x-pagedserve-warning"]) < 2000
    lines = [record.getMessage() for record in caplog.records if "have no effect" in record.getMessage()]
    assert lines
    assert "0-0" in lines[0]
    assert sum(map(len, lines)) < 100_000
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="pagedserve"):
        front.complete(**{"0-0": 1})
    assert not [record for record in caplog.records if "have no effect" in record.getMessage()]
