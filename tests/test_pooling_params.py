"""What may be asked of pooling."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from pagedserve.errors import RequestError
from pagedserve.pooling_params import PoolingParams, floats
from pagedserve.sampling_params import BeamParams, SamplingParams


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"pooling_type": "cls"}, "pooling_type"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": True}, "dimensions"),
        ({"dimensions": 2**21}, "dimensions"),
        ({"dimensions": 8.0}, "dimensions"),
    ],
)
def test_wrong_values_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as raised:
        PoolingParams(**fields)
    assert raised.value.param == param


@pytest.mark.parametrize("fields", [{"max_tokens": 1}, {"n": 2}, {"beam": BeamParams(width=1)}, {"prompt_logprobs": 0}])
def test_a_vector_is_all_that_a_request_for_one_gets(fields: dict[str, Any]) -> None:
    assert SamplingParams(max_tokens=0, pooling=PoolingParams()).pooling == PoolingParams()
    with pytest.raises(RequestError, match="pooling goes with max_tokens 0"):
        SamplingParams(**{"max_tokens": 0, **fields}, pooling=PoolingParams())


def test_vectors_travel_as_little_endian_fp32() -> None:
    assert floats(struct.pack("<3f", 1.0, -0.5, 0.1)) == [1.0, -0.5, struct.unpack("<f", struct.pack("<f", 0.1))[0]]
