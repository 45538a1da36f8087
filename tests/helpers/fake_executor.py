"""A worker without a model, that knows what every slot of every block holds.

A slot holds the `chain` of its token: a value made from all tokens up to there. Writing a token reads the chain before
it through the block table, and sampling reads all of them, so that a wrong copy, a block reused too early, a swap to
the wrong place or a prefix hit on other content is noticed at once, with the place where it happened.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pagedserve.messages import EngineCoreOutputs
from pagedserve.sampling_params import SamplingParams
from pagedserve.scheduler.scheduler import Scheduler
from pagedserve.sequence import Request
from pagedserve.step import ModelRunnerOutput, NewSequence, SchedulerOutput, TokenLogprobs

Chain = Any
ROOT: Chain = 0
VOCAB_SIZE = 50


def extend(chain: Chain, token_id: int) -> Chain:
    """The chain after one more token."""
    return hash((chain, token_id))


class HashModel:
    """Logits that are a function of the whole context, and draws that are a function of logits, seed and choice."""

    root: Chain = ROOT

    def extend(self, chain: Chain, token_id: int) -> Chain:
        return extend(chain, token_id)

    def logprobs(self, chain: Chain) -> list[float]:
        """Log-softmax over the vocabulary."""
        logits = [(hash((chain, token_id, 7)) % 1000) / 125 for token_id in range(VOCAB_SIZE)]
        total = math.log(sum(math.exp(x) for x in logits))
        return [x - total for x in logits]

    def sample(self, chain: Chain, params: SamplingParams, seed: int, choice_index: int) -> tuple[int, float]:
        """One token and its log-probability."""
        if params.is_greedy:
            choice_index = seed = 0
        token_id = hash((chain, seed, choice_index)) % VOCAB_SIZE
        return token_id, -(hash((chain, token_id)) % 1000) / 500

    def generate(self, request: Request, choice_index: int = 0, num_tokens: int | None = None) -> list[int]:
        """What one choice of a request is, without any cache or neighbour: the oracle of invariance tests."""
        chain = self.root
        for token_id in request.prompt_token_ids:
            chain = self.extend(chain, token_id)
        params = request.sampling_params
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(request.eos_token_ids))
        token_ids: list[int] = []
        while len(token_ids) < (params.max_tokens if num_tokens is None else num_tokens):
            token_id, _ = self.sample(chain, params, request.seed, choice_index)
            token_ids.append(token_id)
            chain = self.extend(chain, token_id)
            if token_id in stops and len(token_ids) > params.min_tokens:
                break
        return token_ids


@dataclass
class Row:
    token_ids: list[int]
    lanes: list[list[int]]
    params: SamplingParams
    seed: int
    choice_index: int
    num_prompt_tokens: int
    num_seen: int = 0  # tokens computed since the row came

    @property
    def block_ids(self) -> list[int]:
        """All blocks, those that a window has left behind too."""
        return [block for lane in self.lanes for block in lane]


def lanes_of(block_ids: list[int], num_groups: int) -> list[list[int]]:
    """One list for each layer group."""
    size, rest = divmod(len(block_ids), num_groups)
    assert not rest, "groups have different numbers of blocks"
    return [block_ids[group * size : (group + 1) * size] for group in range(num_groups)]


class FakeExecutor:
    """Obeys SchedulerOutput to the letter, and refuses what breaks its protocol (AssertionError)."""

    def __init__(
        self,
        *,
        num_blocks: int,
        num_host_blocks: int = 0,
        block_size: int = 4,
        model: Any = None,
        windows: tuple[int | None, ...] = (None,),
    ):
        self.block_size = block_size
        self.windows = windows
        self.model = model or HashModel()
        self.device: list[list[Chain | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.host: list[list[Chain | None]] = [[None] * block_size for _ in range(num_host_blocks)]
        self.rows: dict[int, Row] = {}
        # seq_ids whose next logits are not usable.
        self.broken: set[int] = set()
        # seq_ids of steps that failed: what they hold is anybody's guess, and nobody may ask.
        self.lost: set[int] = set()
        # Time of a step, for the cost model.
        self.seconds_per_token = 0.0
        self.seconds_per_swap = 0.0

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """One step."""
        self._apply_block_ops(output)
        self._apply_rows(output)
        return self._compute(output)

    def fail(self, output: SchedulerOutput) -> None:
        """A step that breaks before anything is copied or computed. A next one may have been sent already."""
        self._apply_rows(output)
        self.lost.update(output.seq_ids, (child for child, _ in output.shared_logits))
        self._compute(output)

    def _compute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        result = ModelRunnerOutput(step_id=output.step_id)
        columns = zip(output.seq_ids, output.num_scheduled, output.num_computed, strict=True)
        sampled = []
        for seq_id, num_scheduled, num_computed in columns:
            row = self.rows[seq_id]
            end = num_computed + num_scheduled
            assert num_scheduled > 0 and end <= len(row.token_ids), f"sequence {seq_id} has no tokens to compute"
            for lane in row.lanes:
                assert end <= len(lane) * self.block_size, f"sequence {seq_id} has no blocks for {end} tokens"
            self._write(seq_id, row, num_computed, end)
            row.num_seen += num_scheduled
            if row.params.prompt_logprobs is not None and len(row.token_ids) == row.num_prompt_tokens:
                positions = range(num_computed + 1, min(end + 1, row.num_prompt_tokens))
                result.prompt_logprobs[seq_id] = [_entry(row.token_ids[p], -float(p)) for p in positions]
            if end == len(row.token_ids) and row.params.pooling is not None:
                assert row.num_seen == end or not row.params.pooling.needs_all_tokens, f"{seq_id} misses tokens to pool"
                result.pooled[seq_id] = str(self._read(seq_id)).encode()
            elif end == len(row.token_ids):
                sampled.append((seq_id, seq_id))
        by_parent = dict(sampled)
        for child, parent in output.shared_logits:
            assert parent in by_parent, f"sequence {child} shares logits of {parent}, which is not sampled"
            sampled.append((child, parent))
        chains = {parent: self._read(parent) for parent in by_parent}
        for seq_id, source in sampled:
            self._sample(seq_id, chains[source], result)
        result.forward_seconds = self.seconds_per_token * output.num_tokens
        num_swaps = len(output.block_ops.swap_in) + len(output.block_ops.swap_out)
        result.swap_seconds = self.seconds_per_swap * num_swaps
        return result

    def _apply_block_ops(self, output: SchedulerOutput) -> None:
        ops = output.block_ops
        for source, target in ops.swap_out:
            self.host[target] = self.device[source].copy()
        assert len({t for _, t in ops.swap_out}) == len(ops.swap_out)
        targets = {target for _, target in ops.copy}
        assert len(targets) == len(ops.copy) and not targets & {source for source, _ in ops.copy}
        for source, target in ops.swap_in:
            self.device[target] = self.host[source].copy()
        for source, target in ops.copy:
            self.device[target] = self.device[source].copy()

    def _apply_rows(self, output: SchedulerOutput) -> None:
        for parent, child, choice_index in output.forks:
            row = self.rows[parent]
            assert child not in self.rows
            self.rows[child] = Row(
                row.token_ids.copy(),
                [lane.copy() for lane in row.lanes],
                row.params,
                row.seed,
                choice_index,
                row.num_prompt_tokens,
            )
        for seq_id in output.released:
            del self.rows[seq_id]
        for seq_id, token_id in output.appended:
            self.rows[seq_id].token_ids.append(token_id)
        for new in output.new:
            assert new.seq_id not in self.rows
            self.rows[new.seq_id] = _row_of(new, len(self.windows))
        for seq_id, block_ids in zip(output.seq_ids, output.new_block_ids, strict=True):
            for lane, new_ids in zip(self.rows[seq_id].lanes, lanes_of(block_ids, len(self.windows)), strict=True):
                lane += new_ids
        for seq_id, index, block_id, group in output.replaced_blocks:
            self.rows[seq_id].lanes[group][index] = block_id
        assert len(set(output.seq_ids)) == len(output.seq_ids)

    def _write(self, seq_id: int, row: Row, start: int, end: int) -> None:
        chain = self.model.root
        if seq_id in self.lost:
            return
        for position, token_id in enumerate(row.token_ids[:end]):
            chain = self.model.extend(chain, token_id)
            for group, window in enumerate(self.windows):
                if position >= start:
                    block = self.device[row.lanes[group][position // self.block_size]]
                    block[position % self.block_size] = _content(chain, group)
                elif position == start - 1 or window is not None:
                    self._check(seq_id, row, group, position, start, chain)

    def _read(self, seq_id: int) -> Chain:
        row = self.rows[seq_id]
        chain = self.model.root
        if seq_id in self.lost:
            return chain
        last = len(row.token_ids) - 1
        for position, token_id in enumerate(row.token_ids):
            chain = self.model.extend(chain, token_id)
            for group in range(len(self.windows)):
                self._check(seq_id, row, group, position, last, chain)
        return chain

    def _check(self, seq_id: int, row: Row, group: int, position: int, viewer: int, chain: Chain) -> None:
        """The slot of `position` holds its own content, if the token at `viewer` sees it."""
        window = self.windows[group]
        if window is None or position > viewer - window:
            found = self.device[row.lanes[group][position // self.block_size]][position % self.block_size]
            assert found == _content(chain, group), (
                f"sequence {seq_id} finds other content at token {position} than its own"
            )

    def chain(self, token_ids: list[int]) -> Chain:
        """What the slot of the last of these tokens should hold."""
        chain = self.model.root
        for token_id in token_ids:
            chain = self.model.extend(chain, token_id)
        return chain

    def _sample(self, seq_id: int, chain: Chain, result: ModelRunnerOutput) -> None:
        row = self.rows[seq_id]
        result.seq_ids.append(seq_id)
        if seq_id in self.broken:
            result.errors[seq_id] = "all logits are NaN"
        if row.params.beam is not None or seq_id in self.broken:
            if seq_id in self.broken:
                row.token_ids.append(0)  # the next step may be on its way, and goes on with anything
            else:
                result.candidates[seq_id] = self.candidates(chain, 2 * row.params.beam.width)
            result.sampled_token_ids.append([])
            result.sampled_logprobs.append(0.0)
            return
        token_id, logprob = self.model.sample(chain, row.params, row.seed, row.choice_index)
        row.token_ids.append(token_id)
        result.sampled_token_ids.append([token_id])
        result.sampled_logprobs.append(logprob)
        if row.params.logprobs is not None:
            result.logprobs[seq_id] = [_entry(token_id, logprob)]

    def candidates(self, chain: Chain, num: int) -> list[tuple[int, float]]:
        """The most likely next tokens, best first."""
        logprobs = self.model.logprobs(chain)
        best = sorted(range(len(logprobs)), key=lambda t: -logprobs[t])[:num]
        return [(token_id, logprobs[token_id]) for token_id in best]


def _entry(token_id: int, logprob: float) -> TokenLogprobs:
    return TokenLogprobs(token_ids=[token_id], logprobs=[logprob], rank=1)


def _content(chain: Chain, group: int) -> Any:
    """What a slot of a layer group holds."""
    return (group, chain) if group else chain


def _row_of(new: NewSequence, num_groups: int) -> Row:
    return Row(
        new.token_ids.copy(),
        lanes_of(new.block_ids, num_groups),
        new.sampling_params,
        new.seed,
        new.choice_index,
        new.num_prompt_tokens,
    )


@dataclass
class Collected:
    """All that was reported of one request."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    stop_reasons: dict[int, int | str | None] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    pooled: bytes | None = None
    finished: Any = None
    finished_at: int | None = None


class Driver:
    """Scheduler and fake worker, step by step, with the accounts proved after each.

    With `looks_ahead`, steps are decided and computed before the results of those before them are recorded.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: FakeExecutor,
        *,
        max_tokens_per_step: int | None = None,
        looks_ahead: bool = False,
    ):
        self.looks_ahead = looks_ahead
        # Steps under way: what was decided, and what came of it (None: it failed).
        self.under_way: deque[tuple[SchedulerOutput, ModelRunnerOutput | None]] = deque()
        self.num_looked_ahead = 0
        self.scheduler = scheduler
        self.executor = executor
        self.max_tokens_per_step = max_tokens_per_step
        self.results: dict[str, Collected] = {}
        self.steps: list[SchedulerOutput] = []
        self.finish_order: list[str] = []
        self.on_output: Callable[[SchedulerOutput], None] = lambda output: None

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
            self.results[request.request_id] = Collected()

    def step(self) -> SchedulerOutput:
        """The results of one step, which is decided now unless it is under way, and maybe the decision of the next."""
        if not self.under_way:
            self.launch(self.scheduler.schedule())
        if self.looks_ahead and len(self.under_way) == 1 and (ahead := self.scheduler.schedule_ahead()) is not None:
            self.num_looked_ahead += 1
            self.launch(ahead)
        return self.record()

    def launch(self, output: SchedulerOutput, fails: bool = False) -> None:
        """Compute a step."""
        self.scheduler.check()
        if self.max_tokens_per_step is not None:
            assert output.num_tokens <= self.max_tokens_per_step
        self.steps.append(output)
        self.on_output(output)
        if fails:
            self.executor.fail(output)
            self.under_way.append((output, None))
        else:
            self.under_way.append((output, self.executor.execute(output)))

    def record(self) -> SchedulerOutput:
        """The results of the oldest step under way."""
        output, result = self.under_way.popleft()
        if result is None:
            self.take(self.scheduler.fail_step(output, "failed"))
        else:
            self.take(self.scheduler.update(output, result))
        self.scheduler.check()
        return output

    def run(self, max_steps: int = 5000) -> dict[str, Collected]:
        """Steps until nothing is left to do. Fails where a step computes nothing though requests wait."""
        for _ in range(max_steps):
            if not self.scheduler.has_work() and not self.under_way:
                return self.results
            output = self.step()
            assert output.num_tokens or output.released or not self.scheduler.num_unfinished, "a stall"
        raise AssertionError(f"not done after {max_steps} steps: {self.scheduler.stats()}")

    def take(self, outputs: EngineCoreOutputs | None) -> None:
        """Collect rows as the engine's front would."""
        if outputs is None:
            return
        rows = zip(
            outputs.request_ids,
            outputs.choice_indices,
            outputs.token_ids,
            outputs.finish_reasons,
            outputs.stop_reasons,
            outputs.cumulative_logprobs,
            strict=True,
        )
        for index, (request_id, choice, token_ids, finish_reason, stop_reason, total) in enumerate(rows):
            result = self.results[request_id]
            assert result.finished is None, f"{request_id} has a row after its end"
            assert choice not in result.finish_reasons, f"choice {choice} of {request_id} has a row after its end"
            result.token_ids.setdefault(choice, []).extend(token_ids)
            result.scores[choice] = total
            if finish_reason is not None:
                result.finish_reasons[choice] = str(finish_reason)
                result.stop_reasons[choice] = stop_reason
            if index in outputs.logprobs:
                result.logprobs.setdefault(choice, []).extend(outputs.logprobs[index])
        for request_id, entries in outputs.prompt_logprobs.items():
            self.results[request_id].prompt_logprobs += entries
        for request_id, vector in outputs.pooled.items():
            self.results[request_id].pooled = vector
        for finished in outputs.finished:
            assert self.results[finished.request_id].finished is None, f"{finished.request_id} ends twice"
            self.results[finished.request_id].finished = finished
            self.results[finished.request_id].finished_at = len(self.steps)
            self.finish_order.append(finished.request_id)

    def assert_idle(self) -> None:
        """Nothing runs, waits, or holds a block or a row."""
        stats = self.scheduler.stats()
        assert stats.num_running == stats.num_waiting == stats.num_swapped == 0
        assert stats.kv_cache_usage == stats.host_cache_usage == 0.0
        assert not self.executor.rows
