"""Swap or recompute: which is cheaper for a victim, by what both have cost on this machine so far."""

from __future__ import annotations

from pagedserve.step import ModelRunnerOutput, SchedulerOutput

# Before anything was measured: a host copy at 4 GB/s, and half a millisecond a token of a prompt.
_COPY_BYTES_PER_SECOND = 4e9
_SECONDS_PER_TOKEN = 5e-4
# Weight of the newest measurement: a few steps outweigh the guess, one odd step does not.
_SMOOTHING = 0.2
# A copy that was never measured is tried although the guess says that it costs up to this many times more.
_CURIOSITY = 4
# Steps that compute fewer tokens a sequence are decoding, whose cost a token is not that of recomputation.
_MIN_TOKENS_PER_SEQUENCE = 8


class PreemptionCosts:
    """Seconds a swapped block and a recomputed token take."""

    def __init__(self, mode: str, bytes_per_block: int):
        self._mode = mode
        self.seconds_per_block = max(bytes_per_block, 1) / _COPY_BYTES_PER_SECOND
        self.seconds_per_token = _SECONDS_PER_TOKEN
        self._has_measured_swap = False

    def observe(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Learn from a step."""
        num_blocks = len(output.block_ops.swap_out) + len(output.block_ops.swap_in)
        if num_blocks and result.swap_seconds > 0:
            measured = result.swap_seconds / num_blocks
            weight = _SMOOTHING if self._has_measured_swap else 1.0
            self.seconds_per_block += weight * (measured - self.seconds_per_block)
            self._has_measured_swap = True
        num_tokens = output.num_tokens
        if num_tokens >= _MIN_TOKENS_PER_SEQUENCE * len(output.seq_ids) > 0 and result.forward_seconds > 0:
            self.seconds_per_token += _SMOOTHING * (result.forward_seconds / num_tokens - self.seconds_per_token)

    def prefers_swap(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether moving `num_blocks` out and back beats computing `num_tokens` again (always, or never, by mode)."""
        if self._mode != "auto":
            return self._mode == "swap"
        recompute_seconds = num_tokens * self.seconds_per_token
        if not self._has_measured_swap:
            recompute_seconds *= _CURIOSITY
        return 2 * num_blocks * self.seconds_per_block < recompute_seconds
