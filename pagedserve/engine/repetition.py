"""Finds outputs that go round in a circle: the last tokens are one pattern, over and over."""

from __future__ import annotations

from collections.abc import Iterable

from pagedserve.sampling_params import RepetitionDetection


class RepetitionDetector:
    """Follows one output. A token costs a comparison for each size of a pattern."""

    def __init__(self, rule: RepetitionDetection):
        self._sizes = range(rule.min_pattern_size, rule.max_pattern_size + 1)
        self._min_count = rule.min_count
        # For each size: how many of the last tokens in a row equal the token one pattern before them.
        self._num_equal = dict.fromkeys(self._sizes, 0)
        self._tail: list[int] = []

    def feed(self, token_ids: Iterable[int]) -> int | None:
        """How many of `token_ids` it takes to close a circle; None where they close none."""
        tail, num_equal = self._tail, self._num_equal
        for count, token_id in enumerate(token_ids, start=1):
            for size in self._sizes:
                if size > len(tail):
                    break
                num_equal[size] = num_equal[size] + 1 if tail[-size] == token_id else 0
                if num_equal[size] >= size * (self._min_count - 1):
                    return count
            tail.append(token_id)
            if len(tail) > 2 * self._sizes.stop:
                del tail[: -self._sizes.stop]
        return None
