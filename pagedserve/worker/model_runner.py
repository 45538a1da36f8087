"""One step: bring the rows up to date, gather the inputs, run the model, sample.

The hottest file of the data plane. Nothing here knows a feature or a model: what a request wishes lives in `sampling`,
how attention is computed in its backend, who runs is decided above. Be paranoid about adding lines.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from pagedserve.attention import AttentionBackend
from pagedserve.layers.attention import ForwardContext
from pagedserve.sampling.batch import SamplingBatch, TokenHistory, TokenMasks
from pagedserve.sampling.sampler import Sampler
from pagedserve.step import ModelRunnerOutput, SamplingInput, SchedulerOutput
from pagedserve.worker.graphs import MakeGraph
from pagedserve.worker.input_batch import InputBatch, gather, sample_batches
from pagedserve.worker.kv_storage import KVStorage
from pagedserve.worker.pooling import pooled
from pagedserve.worker.prompt_logprobs import prompt_logprobs
from pagedserve.worker.rows import Rows
from pagedserve.worker.step_inputs import StepInputs
from pagedserve.worker.step_program import StepProgramGraph


@dataclass(slots=True, kw_only=True)
class RunningStep:
    """A step from its forward to its result."""

    output: SchedulerOutput
    result: ModelRunnerOutput
    started: float
    batch: InputBatch | None = None  # None: nothing is computed
    sampled: np.ndarray | None = None  # int64 [num_sampled], their places in the batch
    hidden: torch.Tensor | None = None  # [num_tokens, hidden]
    logits: torch.Tensor | None = None  # [num_sampled, vocab]


class ModelRunner:
    """Executes steps of one model on one device: `submit`, `sample` and `result` for each of them, in order."""

    def __init__(
        self,
        model: Any,
        *,
        attention: AttentionBackend,
        storage: KVStorage,
        rows: Rows,
        sampler: Sampler,
        device: torch.device,
        places: tuple[tuple[int, int], ...] = (),
        make_graph: MakeGraph = StepProgramGraph,
    ) -> None:
        """`model` is a class of `pagedserve.models`; for `places` see ForwardContext."""
        self._model = model
        self._attention = attention
        self._storage = storage
        self._rows = rows
        self._sampler = sampler
        self._device = device
        self._places = places
        self.graph = make_graph(model, self._samples)
        # The batch of the last step, and what it was made for: decoding samples the same rows step after step.
        self._batch_key: tuple[int, list[int]] | None = None
        self._batch: SamplingBatch | None = None

    @torch.inference_mode()
    def submit(self, output: SchedulerOutput) -> RunningStep:
        """Applies a step's differences in the order that SchedulerOutput documents, then computes what it schedules."""
        # Rows are bookkeeping that does not look at the pools: first, so that they are right even if a copy fails.
        self._rows.apply(output)
        result = ModelRunnerOutput(step_id=output.step_id)
        result.swap_seconds = self._storage.execute(output.block_ops)
        step = RunningStep(output=output, result=result, started=time.perf_counter())
        if output.seq_ids:
            step.batch = batch = gather(self._rows, output)
            step.sampled = sampled = np.flatnonzero(batch.is_sampled)
            step.hidden, step.logits = self.graph(self._inputs(batch, batch.query_start_loc[sampled + 1] - 1))
        return step

    @torch.inference_mode()
    def sample(self, step: RunningStep, sampling: SamplingInput) -> None:
        """Draws for the sequences whose tokens are all computed now, and tells what else the step is asked for."""
        if step.batch is None:
            return
        result, seq_ids = step.result, step.output.seq_ids
        self._sample(step, sampling)
        result.prompt_logprobs = prompt_logprobs(
            self._rows, seq_ids, step.batch, step.hidden, self._model.compute_logits, self._sampler
        )
        result.pooled, failed = pooled(self._rows, seq_ids, step.batch, step.hidden)
        result.errors.update(failed)
        # Sampling has brought tokens to the host, so the device is done.
        result.forward_seconds = time.perf_counter() - step.started

    def result(self, step: RunningStep) -> ModelRunnerOutput:
        """What the step drew."""
        return step.result

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """See StepGraph.capture_next."""
        return self.graph.capture_next()

    def _inputs(self, batch: InputBatch, last_tokens: np.ndarray) -> StepInputs:
        build = partial(
            self._attention.build_metadata,
            query_start_loc=self._tensor(batch.query_start_loc),
            seq_lens=self._tensor(batch.seq_lens),
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
        )
        groups = zip(self._tensor(batch.block_tables), self._tensor(batch.slot_mapping), strict=True)
        metadata, *more = [build(block_tables=tables, slot_mapping=slots) for tables, slots in groups]
        return StepInputs(
            token_ids=self._tensor(batch.token_ids),
            positions=self._tensor(batch.positions),
            last_tokens=self._tensor(last_tokens.astype(np.int64)),
            context=ForwardContext(
                metadata=metadata, more_metadata=tuple(more), kv_cache=self._storage.device_pool, places=self._places
            ),
        )

    def _samples(self) -> tuple[StepInputs, StepInputs]:
        first, second = sample_batches(self._rows.block_tables.block_size, self._rows.block_tables.num_groups)
        return self._inputs(*first), self._inputs(*second)

    def _sample(self, step: RunningStep, sampling: SamplingInput) -> None:
        """Draws for the sampled sequences, and for the children that share their logits."""
        output, result, logits, sampled = step.output, step.result, step.logits, step.sampled
        assert logits is not None and sampled is not None
        if not len(sampled):
            return
        seq_ids = [output.seq_ids[i] for i in sampled.tolist()]
        if output.shared_logits:
            place = {seq_id: i for i, seq_id in enumerate(seq_ids)}
            sources = list(range(len(seq_ids))) + [place[parent] for _, parent in output.shared_logits]
            logits = logits[torch.tensor(sources, device=self._device)]
            seq_ids = seq_ids + [child for child, _ in output.shared_logits]

        rows = self._rows.rows_of(seq_ids)
        history = TokenHistory(self._rows.token_ids, rows, self._rows.num_tokens[rows])
        masks = None
        if sampling.masked_seq_ids:
            place = {seq_id: i for i, seq_id in enumerate(seq_ids)}
            places = [place[seq_id] for seq_id in sampling.masked_seq_ids]
            masks = TokenMasks.unpack(places, sampling.token_masks, self._device)
        drawn = self._sampler(logits, self._sampling_batch(seq_ids), history, masks)
        has_token = drawn.token_ids >= 0
        self._rows.append(rows[has_token], drawn.token_ids[has_token])
        result.seq_ids = seq_ids
        result.sampled_token_ids = [[t] if t >= 0 else [] for t in drawn.token_ids.tolist()]
        result.sampled_logprobs = drawn.logprobs
        result.logprobs = {seq_ids[i]: [entry] for i, entry in drawn.top_logprobs.items()}
        result.candidates = {seq_ids[i]: best for i, best in drawn.candidates.items()}
        result.errors = {seq_ids[i]: message for i, message in drawn.errors.items()}

    def _sampling_batch(self, seq_ids: list[int]) -> SamplingBatch:
        key = (self._rows.generation, seq_ids)
        if self._batch is None or self._batch_key != key:
            states = [self._rows.state_of(seq_id) for seq_id in seq_ids]
            self._batch = SamplingBatch(states, self._sampler.vocab_size, self._device)
            self._batch_key = key
        return self._batch

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
