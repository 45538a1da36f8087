"""Requests and schedulers with sane small defaults; a test names only what matters to it."""

from __future__ import annotations

from itertools import count
from typing import Any

from pagedserve.config import CacheConfig, SchedulerConfig
from pagedserve.sampling_params import SamplingParams
from pagedserve.scheduler.scheduler import Scheduler
from pagedserve.sequence import Request

_ids = count()
_REQUEST_FIELDS = (
    "request_id", "seed", "eos_token_ids", "arrival_time", "deadline", "priority", "adapter", "cache_salt",
    "read_prefix_cache",
)  # fmt: skip
_CACHE_FIELDS = ("block_size", "enable_prefix_caching")


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_request(prompt: int | list[int] = 5, **options: Any) -> Request:
    """A request; `prompt` is its ids, or their number (ids are then different for each request).

    Options are fields of Request or of SamplingParams; greedy without stop ids unless said otherwise.
    """
    number = next(_ids)
    if isinstance(prompt, int):
        prompt = [1000 + number * 1000 + i for i in range(prompt)]
    fields = {name: options.pop(name) for name in _REQUEST_FIELDS if name in options}
    fields.setdefault("request_id", f"request-{number}")
    fields.setdefault("seed", number)
    return Request(prompt_token_ids=prompt, sampling_params=SamplingParams(**{"temperature": 0.0, **options}), **fields)


def make_scheduler(num_blocks: int = 64, num_host_blocks: int = 0, **options: Any) -> Scheduler:
    """A scheduler over blocks of 4 tokens, without a watermark; options are fields of its configs or arguments."""
    cache = {"block_size": 4, **{name: options.pop(name) for name in _CACHE_FIELDS if name in options}}
    arguments = {
        name: options.pop(name)
        for name in ("max_model_len", "bytes_per_block", "clock", "windows", "fill_masks")
        if name in options
    }
    return Scheduler(
        SchedulerConfig(**{"watermark": 0.0, **options}),
        CacheConfig(**cache),
        num_device_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        **{"max_model_len": 512, **arguments},
    )
