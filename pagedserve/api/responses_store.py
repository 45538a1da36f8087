"""Responses that clients may come back to: in memory, bounded in number and bytes, the oldest forgotten first."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from pagedserve.api.protocol.responses import Response
from pagedserve.errors import NotFoundError

MAX_RESPONSES = 4096
MAX_BYTES = 256 << 20


@dataclass(slots=True)
class Stored:
    """A response, the items that it answers (those of earlier responses are shared with them), and who works on it."""

    response: Response
    input_items: list[dict[str, Any]]
    num_own_items: int
    size: int = 0
    task: asyncio.Task[None] | None = None

    def history(self) -> list[dict[str, Any]]:
        """The whole conversation, as items."""
        return [*self.input_items, *msgspec.to_builtins(self.response.output)]


class ResponseStore:
    """By id. What still runs is not forgotten."""

    def __init__(self, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES):
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._stored

    def put(self, stored: Stored) -> None:
        """Remember a response, or what it has become."""
        self._drop(stored.response.id)
        own = stored.input_items[len(stored.input_items) - stored.num_own_items :]
        # A list of the earlier items costs a pointer each.
        stored.size = len(msgspec.json.encode((stored.response, own))) + 8 * len(stored.input_items)
        self._stored[stored.response.id] = stored
        self._num_bytes += stored.size
        for response_id in list(self._stored):
            if len(self._stored) <= self._max_responses and self._num_bytes <= self._max_bytes:
                return
            if self._stored[response_id].task is None:
                self._drop(response_id)

    def get(self, response_id: str, param: str = "response_id") -> Stored:
        """NotFoundError where it never was, or was forgotten."""
        stored = self._stored.get(response_id)
        if stored is None:
            raise NotFoundError(
                f"there is no response {response_id[:100]!a} (they are kept in memory, and the oldest are forgotten)",
                param=param,
            )
        self._stored.move_to_end(response_id)
        return stored

    def delete(self, response_id: str) -> None:
        """Forget a response; one that runs is ended. NotFoundError as for `get`."""
        stored = self.get(response_id)
        if stored.task is not None:
            stored.task.cancel()
        self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        stored = self._stored.pop(response_id, None)
        if stored is not None:
            self._num_bytes -= stored.size
