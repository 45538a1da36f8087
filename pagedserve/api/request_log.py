"""What became of recent requests: a bounded ring, for `/v1/requests` and for whoever wonders why one was slow."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from pagedserve.api.generation import UsageCounter
from pagedserve.api.protocol.requests import RequestRecord

MAX_REQUESTS = 1000


@dataclass(slots=True, eq=False)
class Entry:
    """One request; its numbers are read from the counter that its answer keeps."""

    request_id: str
    route: str
    model: str
    num_prompts: int
    usage: UsageCounter = field(default_factory=UsageCounter)
    created: float = field(default_factory=time.time)
    started: float = field(default_factory=time.monotonic)

    def record(self, *, is_live: bool) -> RequestRecord:
        """The request as it is now."""
        metrics = self.usage.metrics
        is_done = len(metrics) == self.num_prompts and all(m.finished_time is not None for m in metrics)
        first_token = min((m.first_token_time for m in metrics if m.first_token_time is not None), default=None)
        usage = self.usage.usage()
        status = "failed"
        if is_done:
            status = "finished"
        elif is_live:
            status = "running" if usage.completion_tokens else "queued"
        scheduled = min((m.first_scheduled_time for m in metrics if m.first_scheduled_time is not None), default=None)
        finished = max((m.finished_time for m in metrics if m.finished_time is not None), default=None)
        return RequestRecord(
            id=self.request_id,
            route=self.route,
            model=self.model,
            status=status,
            created=self.created,
            queued_seconds=self._since(scheduled),
            first_token_seconds=self._since(first_token),
            finished_seconds=self._since(finished) if is_done else None,
            num_prompts=self.num_prompts,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.prompt_tokens_details.cached_tokens,
            completion_tokens=usage.completion_tokens,
            num_preemptions=usage.completion_tokens_details.num_preemptions,
            num_wasted_tokens=usage.completion_tokens_details.num_wasted_tokens,
        )

    def _since(self, moment: float | None) -> float | None:
        return None if moment is None else round(max(moment - self.started, 0.0), 6)


class RequestLog:
    """The latest entries, by id; of several with one id the latest is found."""

    def __init__(self, max_requests: int = MAX_REQUESTS):
        self._entries: deque[Entry] = deque()
        self._by_id: dict[str, Entry] = {}
        self._max_requests = max_requests

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """Newest first."""
        return reversed(self._entries)

    def add(self, entry: Entry) -> None:
        """Remember a request, and forget the oldest beyond the limit."""
        self._entries.append(entry)
        self._by_id[entry.request_id] = entry
        if len(self._entries) > self._max_requests:
            oldest = self._entries.popleft()
            if self._by_id.get(oldest.request_id) is oldest:
                del self._by_id[oldest.request_id]

    def get(self, request_id: str) -> Entry | None:
        return self._by_id.get(request_id)
