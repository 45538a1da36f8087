"""StopRule: stop tokens, minimum and maximum length."""

from __future__ import annotations

import pytest

from pagedserve.scheduler.stopping import StopRule
from pagedserve.sequence import FinishReason, Sequence
from tests.helpers.factories import make_request


def reason(output: list[int], *, max_model_len: int = 100, **options: object) -> FinishReason | None:
    request = make_request([9, 9, 9], **options)
    sequence = Sequence(0, 0, [9, 9, 9, *output], 3)
    return StopRule(request, max_model_len).reason(sequence)


@pytest.mark.parametrize(
    ("output", "options", "expected"),
    [
        ([1], {}, None),
        ([2], {"eos_token_ids": (2,)}, FinishReason.STOP),
        ([2], {"eos_token_ids": (2,), "ignore_eos": True}, None),
        ([2], {"eos_token_ids": (2,), "ignore_eos": True, "stop_token_ids": (2,)}, FinishReason.STOP),
        ([2], {"stop_token_ids": (2,), "min_tokens": 1}, None),
        ([1, 2], {"stop_token_ids": (2,), "min_tokens": 1}, FinishReason.STOP),
        ([1, 1], {"max_tokens": 2}, FinishReason.LENGTH),
        ([1, 2], {"max_tokens": 2, "stop_token_ids": (2,)}, FinishReason.STOP),
        ([1, 2], {"max_tokens": 2, "min_tokens": 2, "stop_token_ids": (2,)}, FinishReason.LENGTH),
        ([1] * 7, {"max_tokens": None, "max_model_len": 10}, FinishReason.LENGTH),
        ([1] * 6, {"max_tokens": None, "max_model_len": 10}, None),
    ],
)
def test_reason(output: list[int], options: dict[str, object], expected: FinishReason | None) -> None:
    assert reason(output, **options) is expected


def test_only_stop_tokens_that_the_client_named_are_named_back() -> None:
    rule = StopRule(make_request(3, eos_token_ids=(2,), stop_token_ids=(2, 5)), 100)
    assert rule.stop_reason(2) is None and rule.stop_reason(5) == 5
