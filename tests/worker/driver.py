"""A scheduler by hand: sends a ModelRunner what a test decides, and keeps the block tables for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from pagedserve import quantization
from pagedserve.attention import BACKENDS, AttentionBackend
from pagedserve.model_files import resolve
from pagedserve.models.loader import load_model, parse_config
from pagedserve.sampling.sampler import Sampler
from pagedserve.sampling_params import SamplingParams
from pagedserve.step import ModelRunnerOutput, NewSequence, SamplingInput, SchedulerOutput
from pagedserve.worker.kv_storage import KVStorage
from pagedserve.worker.model_runner import ModelRunner
from pagedserve.worker.rows import Rows
from pagedserve.worker.worker import Worker
from tests.helpers.dense_weights import DenseMethod

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)
BLOCK_SIZE = 4


def execute(runner: ModelRunner | Worker, output: SchedulerOutput) -> ModelRunnerOutput:
    """One step from its decision to its result."""
    step = runner.submit(output)
    runner.sample(step, SamplingInput(step_id=output.step_id))
    return runner.result(step)


@dataclass
class Tracked:
    """What the control plane knows of one sequence."""

    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    choice_index: int
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_sent: int = 0  # how many of the blocks the worker's row knows


class Driver:
    """A runner over a checkpoint, with a small pool whose device blocks start out as NaN.

    With torch's attention and products, or with the `native` ones.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        num_rows: int = 4,
        num_blocks: int = 64,
        num_host_blocks: int = 32,
        vocab_limit: int | None = None,
        native: bool = False,
        backend: type[AttentionBackend] | None = None,
    ) -> None:
        files = resolve(str(checkpoint))
        config = parse_config(files)
        spec = config.attention_spec(
            block_size=BLOCK_SIZE, dtype=torch.float32, kv_cache_dtype=torch.float32, device=CPU
        )
        attention = (backend or BACKENDS.resolve("cpu" if native else "reference"))(spec)
        quant = quantization.select("auto", CPU) if native else DenseMethod()
        model = load_model(files, config, attention=attention, quant=quant, dtype=torch.float32, device=CPU)
        self.storage = KVStorage(
            num_device_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            num_layers=model.num_layers,
            layer_block_shape=attention.layer_block_shape,
            dtype=torch.float32,
            device=CPU,
        )
        self.storage.device_pool.fill_(torch.nan)
        self.rows = Rows(num_rows, BLOCK_SIZE, num_tokens=8)
        self.runner = ModelRunner(
            model,
            attention=attention,
            storage=self.storage,
            rows=self.rows,
            sampler=Sampler(model.vocab_size, vocab_limit),
            device=CPU,
        )
        self.sequences: dict[int, Tracked] = {}
        self.free = list(range(num_blocks))
        self._pending = SchedulerOutput(step_id=0)
        self._step_id = 0

    def add(
        self,
        seq_id: int,
        prompt: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        seed: int = 0,
        choice_index: int = 0,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        """The sequence arrives with the next step."""
        self.sequences[seq_id] = Tracked(list(prompt), len(prompt), params, seed, choice_index)
        self._send_new(seq_id, eos_token_ids)

    def release(self, seq_id: int, *, forget: bool = True) -> None:
        """The sequence leaves with the next step; its blocks are free at once, and soon overwritten."""
        self._pending.released.append(seq_id)
        sequence = self.sequences[seq_id]
        used_elsewhere = {b for s in self.sequences.values() if s is not sequence for b in s.block_ids}
        self.free += [b for b in sequence.block_ids if b not in used_elsewhere]
        sequence.block_ids = []
        if forget:
            del self.sequences[seq_id]

    def recompute(self, seq_id: int) -> None:
        """Preemption by recomputation: leaves, and comes back with nothing computed."""
        self.release(seq_id, forget=False)
        self.run([])
        self.sequences[seq_id].num_computed = 0
        self._send_new(seq_id)

    def swap_out(self, seq_id: int, host_blocks: Sequence[int]) -> None:
        sequence = self.sequences[seq_id]
        self._pending.block_ops.swap_out += list(zip(sequence.block_ids, host_blocks, strict=True))
        self.release(seq_id, forget=False)

    def swap_in(self, seq_id: int, host_blocks: Sequence[int]) -> None:
        sequence = self.sequences[seq_id]
        sequence.block_ids = [self.free.pop() for _ in host_blocks]
        self._pending.block_ops.swap_in += list(zip(host_blocks, sequence.block_ids, strict=True))
        self._send_new(seq_id)

    def fork(self, parent: int, child: int, choice_index: int, *, shares_logits: bool = False) -> None:
        """A child of a row that exists; of one that is still to be sent, the child is sent beside it."""
        source = self.sequences[parent]
        self.sequences[child] = replace(
            source, token_ids=list(source.token_ids), block_ids=list(source.block_ids), choice_index=choice_index
        )
        if all(new.seq_id != parent for new in self._pending.new):
            self._pending.forks.append((parent, child, choice_index))
        if shares_logits:
            # Made when the parent's blocks of this step are there; until then it holds none.
            self.sequences[child].block_ids = []
            self._pending.shared_logits.append((child, parent))

    def append(self, seq_id: int, token_id: int) -> None:
        """A token that the control plane chose."""
        self.sequences[seq_id].token_ids.append(token_id)
        self._pending.appended.append((seq_id, token_id))

    def run(self, scheduled: Sequence[tuple[int, int]]) -> ModelRunnerOutput:
        """One step: (seq_id, number of tokens). Shared blocks that it writes into are copied first."""
        output = self._pending
        self._step_id += 1
        output.step_id = self._step_id
        for seq_id, count in scheduled:
            sequence = self.sequences[seq_id]
            self._own_written_block(seq_id, output)
            end = sequence.num_computed + count
            missing = -(-end // BLOCK_SIZE) - len(sequence.block_ids)
            sequence.block_ids += [self.free.pop() for _ in range(missing)]
            output.seq_ids.append(seq_id)
            output.num_scheduled.append(count)
            output.num_computed.append(sequence.num_computed)
            output.new_block_ids.append(sequence.block_ids[sequence.num_sent :])
            sequence.num_sent = len(sequence.block_ids)
            sequence.num_computed = end
        forked = {child for _, child, _ in output.forks}
        for child, parent in output.shared_logits:
            # The child has the blocks that this step gave its parent; its row, a copy from before, hears of them later.
            self.sequences[child].num_computed = self.sequences[parent].num_computed
            self.sequences[child].block_ids = list(self.sequences[parent].block_ids)
            if child not in forked:
                self._send_new(child)
        self._pending = SchedulerOutput(step_id=0)
        result = execute(self.runner, output)
        for seq_id, tokens in zip(result.seq_ids, result.sampled_token_ids, strict=True):
            self.sequences[seq_id].token_ids += tokens
        return result

    def generate(self, seq_ids: Sequence[int], num_tokens: int, *, chunk: int = 1000) -> list[list[int]]:
        """Steps until each sequence has that many output tokens, computing at most `chunk` tokens of each a step."""
        while pending := [s for s in seq_ids if len(self.output(s)) < num_tokens]:
            self.run([(s, min(chunk, self.need(s))) for s in pending])
        return [self.output(s) for s in seq_ids]

    def need(self, seq_id: int) -> int:
        sequence = self.sequences[seq_id]
        return len(sequence.token_ids) - sequence.num_computed

    def output(self, seq_id: int) -> list[int]:
        sequence = self.sequences[seq_id]
        return sequence.token_ids[sequence.num_prompt_tokens :]

    def _send_new(self, seq_id: int, eos_token_ids: tuple[int, ...] = ()) -> None:
        s = self.sequences[seq_id]
        s.num_sent = len(s.block_ids)
        self._pending.new.append(
            NewSequence(
                seq_id=seq_id,
                token_ids=list(s.token_ids),
                num_prompt_tokens=s.num_prompt_tokens,
                num_computed_tokens=s.num_computed,
                block_ids=list(s.block_ids),
                sampling_params=s.params,
                seed=s.seed,
                choice_index=s.choice_index,
                eos_token_ids=eos_token_ids,
            )
        )

    def _own_written_block(self, seq_id: int, output: SchedulerOutput) -> None:
        """Copy-on-write of the block that holds the first token to be computed, where another sequence has it too."""
        sequence = self.sequences[seq_id]
        index = sequence.num_computed // BLOCK_SIZE
        if index >= len(sequence.block_ids):
            return
        shared = sequence.block_ids[index]
        if not any(shared in s.block_ids for i, s in self.sequences.items() if i != seq_id):
            return
        own = self.free.pop()
        output.block_ops.copy.append((shared, own))
        output.replaced_blocks.append((seq_id, index, own, 0))
        sequence.block_ids[index] = own
