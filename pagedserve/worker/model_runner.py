"""One step: bring the rows up to date, gather the inputs, run the model, sample.

The hottest file of the data plane. Nothing here knows a feature or a model: what a request wishes lives in `sampling`,
how attention is computed in its backend, who runs is decided above. Be paranoid about adding lines.

Two kinds of functions: those that look at rows run when they are called, those that work on the device (`_forward`,
`_draw`) when its queue comes to them. The latter never wait for the device, and never look at rows: those may be a step
ahead. Sampled ids stay on the device and feed the next step's forward; the host learns of them later, from a copy.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from pagedserve.attention import AttentionBackend
from pagedserve.layers.attention import ForwardContext
from pagedserve.sampling.batch import SamplingBatch, TokenHistory, TokenMasks
from pagedserve.sampling.sampler import Drawn, Sampler, SamplerCall
from pagedserve.sampling.transfers import Later, Mark, Readback, to_device
from pagedserve.step import ModelRunnerOutput, SamplingInput, SchedulerOutput, TokenLogprobs
from pagedserve.worker.device_queue import DeviceQueue
from pagedserve.worker.graphs import MakeGraph
from pagedserve.worker.input_batch import InputBatch, gather, sample_batches
from pagedserve.worker.input_buffer import InputBuffer
from pagedserve.worker.kv_storage import KVStorage
from pagedserve.worker.pooling import PoolingWish, pooled, pooling_wishes, read_states
from pagedserve.worker.prompt_logprobs import PromptWish, prompt_logprobs, prompt_wishes
from pagedserve.worker.rows import Rows
from pagedserve.worker.step_inputs import StepInputs
from pagedserve.worker.step_program import StepProgramGraph


@dataclass(slots=True, kw_only=True)
class RunningStep:
    """A step from its decision to its result."""

    output: SchedulerOutput
    # What the host knows: the sequences that draw, those that share their parents' logits last, and all wishes.
    seq_ids: list[int] = field(default_factory=list)
    rows: np.ndarray | None = None  # int64 [num_drawn]
    lengths: np.ndarray | None = None  # int64 [num_drawn]: their tokens before this step draws
    generation: int = 0  # of the rows, when they were looked up
    sources: list[int] | None = None  # [num_drawn]: whose logits each of them has, where any are shared
    sampling: SamplingBatch | None = None
    prompts: list[PromptWish] = field(default_factory=list)
    poolings: list[PoolingWish] = field(default_factory=list)
    # What the device is given: inputs, and the tokens in them that another step draws.
    inputs: StepInputs | None = None  # None: nothing is computed
    unknown: torch.Tensor | None = None  # int64 [num_unknown]: places in inputs.token_ids
    drawn_places: torch.Tensor | None = None  # int64 [num_unknown]: places in before.drawn.token_ids
    before: RunningStep | None = None
    # What the device has made of it.
    hidden: torch.Tensor | None = None  # [num_tokens, hidden]
    logits: torch.Tensor | None = None  # [num_sampled, vocab]
    drawn: Drawn | None = None
    prompt_logprobs: Later[dict[int, list[TokenLogprobs]]] | None = None
    swap_seconds: float = 0.0
    began: Mark | None = None
    ended: Mark | None = None
    # Forward and draws: done as far as the device's queue has been filled.
    forward: Future[None] | None = None
    draws: Future[None] | None = None

    @property
    def error(self) -> BaseException | None:
        """What is known to have gone wrong so far."""
        for work in (self.forward, self.draws):
            if work is not None and work.done() and (error := work.exception()) is not None:
                return error
        return None


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
        queue: DeviceQueue | None = None,
    ) -> None:
        """`model` is a class of `pagedserve.models`; for `places` see ForwardContext."""
        self._model = model
        self._attention = attention
        self._storage = storage
        self._rows = rows
        self._sampler = sampler
        self._device = device
        self._places = places
        self._queue = queue or DeviceQueue()
        self._buffer = InputBuffer(device)
        self.graph = make_graph(model, self._samples)
        self._last_step: RunningStep | None = None
        # The batch of the last step, and what it was made for: decoding samples the same rows step after step.
        self._batch_key: tuple[int, list[int]] | None = None
        self._batch: SamplingBatch | None = None

    # ---- what is done when it is asked for -------------------------------------------------------------------

    @torch.inference_mode()
    def submit(self, output: SchedulerOutput) -> RunningStep:
        """Applies a step's differences in the order that SchedulerOutput documents, and begins to compute what it
        schedules."""
        # Rows are bookkeeping that does not look at the pools: first, so that they are right even if a copy fails.
        self._rows.apply(output)
        step = RunningStep(output=output, before=self._last_step)
        self._last_step = step
        if output.seq_ids:
            batch = gather(self._rows, output)
            sampled = np.flatnonzero(batch.is_sampled)
            self._send_inputs(step, batch, sampled)
            self._expect_draws(step, batch, sampled)
            step.prompts = prompt_wishes(self._rows, output.seq_ids, batch)
            step.poolings = pooling_wishes(self._rows, output.seq_ids, batch)
        step.forward = self._queue.submit(partial(self._forward, step))
        return step

    @torch.inference_mode()
    def sample(self, step: RunningStep, sampling: SamplingInput) -> None:
        """Has the step draw, once all tokens before its own are known: by now its forward is under way."""
        call = None
        if step.sampling is not None:
            assert step.rows is not None and step.lengths is not None
            masks = None
            if sampling.masked_seq_ids:
                place = {seq_id: i for i, seq_id in enumerate(step.seq_ids)}
                places = [place[seq_id] for seq_id in sampling.masked_seq_ids]
                masks = TokenMasks.unpack(places, sampling.token_masks, self._device)
            history = TokenHistory(self._rows.token_ids, step.rows, step.lengths)
            call = self._sampler.prepare(step.sampling, history, masks)
        step.draws = self._queue.submit(partial(self._draw, step, call))

    def result(self, step: RunningStep) -> ModelRunnerOutput:
        """Waits for what the step drew, and tells it; raises what went wrong in it."""
        assert step.draws is not None, "nobody asked it to sample"
        step.draws.result()
        result = ModelRunnerOutput(step_id=step.output.step_id, swap_seconds=step.swap_seconds)
        if step.inputs is None:
            return result
        assert step.began is not None and step.ended is not None and step.prompt_logprobs is not None
        step.ended.wait()
        if step.drawn is not None:
            self._tell(step, step.drawn, result)
        result.prompt_logprobs = step.prompt_logprobs()
        result.pooled, failed = pooled(self._rows, step.poolings)
        result.errors.update(failed)
        result.forward_seconds = step.ended.seconds_since(step.began)
        return result

    def withdraw(self, step: RunningStep) -> None:
        """The step came to nothing, and will be submitted anew, maybe in parts: its rows expect no token of it."""
        if step.rows is not None and step.lengths is not None:
            self._rows.num_tokens[step.rows] = step.lengths

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """See StepGraph.capture_next."""
        return self.graph.capture_next()

    def close(self) -> None:
        """Waits for whatever is under way."""
        self._queue.close()

    def _send_inputs(self, step: RunningStep, batch: InputBatch, sampled: np.ndarray) -> None:
        unknown = [batch.unknown, batch.drawn_places] if len(batch.unknown) else []
        step.inputs, sent = self._inputs(batch, batch.query_start_loc[sampled + 1] - 1, unknown)
        if sent:
            step.unknown, step.drawn_places = sent
        else:
            step.before = None

    def _expect_draws(self, step: RunningStep, batch: InputBatch, sampled: np.ndarray) -> None:
        """Whoever is at these places of the batch draws, and the children that share their logits."""
        if not len(sampled):
            return
        output = step.output
        seq_ids = output.seq_ids
        if len(sampled) < len(seq_ids):
            seq_ids = [seq_ids[i] for i in sampled.tolist()]
        step.seq_ids, step.rows, step.lengths = seq_ids, batch.rows[sampled], batch.num_tokens[sampled]
        if output.shared_logits:
            place = {seq_id: i for i, seq_id in enumerate(seq_ids)}
            step.sources = list(range(len(seq_ids))) + [place[parent] for _, parent in output.shared_logits]
            step.seq_ids = seq_ids + [child for child, _ in output.shared_logits]
            step.rows = self._rows.rows_of(step.seq_ids)
            step.lengths = self._rows.num_tokens[step.rows]
        step.sampling = self._sampling_batch(step.seq_ids)
        step.generation = self._rows.generation
        self._rows.expect(step.rows)

    def _tell(self, step: RunningStep, drawn: Drawn, result: ModelRunnerOutput) -> None:
        assert step.rows is not None and step.lengths is not None
        output, seq_ids = drawn.output(), step.seq_ids
        rows = step.rows if step.generation == self._rows.generation else self._rows.rows_left(seq_ids)
        self._rows.learn(rows, step.lengths, output.token_ids)
        result.seq_ids = seq_ids
        result.sampled_token_ids = [[t] if t >= 0 else [] for t in output.token_ids.tolist()]
        result.sampled_logprobs = output.logprobs
        result.logprobs = {seq_ids[i]: [entry] for i, entry in output.top_logprobs.items()}
        result.candidates = {seq_ids[i]: best for i, best in output.candidates.items()}
        result.errors = {seq_ids[i]: message for i, message in output.errors.items()}

    # ---- what the device is given, in the order of its queue -------------------------------------------------

    @torch.inference_mode()
    def _forward(self, step: RunningStep) -> None:
        step.swap_seconds = self._storage.execute(step.output.block_ops)
        if step.inputs is None:
            return
        step.began = Mark(self._device)
        if step.unknown is not None and step.drawn_places is not None:
            # Where the step before failed there is nothing to go on from, and nobody who still wants to.
            drawn = step.before.drawn if step.before is not None else None
            if drawn is not None:
                step.inputs.token_ids[step.unknown] = drawn.token_ids[step.drawn_places].clamp(min=0)
            step.before = None
        step.hidden, step.logits = self.graph(step.inputs)

    @torch.inference_mode()
    def _draw(self, step: RunningStep, call: SamplerCall | None) -> None:
        assert step.forward is not None
        step.forward.result()
        if step.inputs is None:
            return
        assert step.hidden is not None and step.logits is not None
        readback = Readback(self._device)
        if call is not None:
            logits = step.logits
            if step.sources is not None:
                logits = logits[to_device(step.sources, self._device, torch.int64)]
            step.drawn = self._sampler.draw(logits, call, readback)
        step.prompt_logprobs = prompt_logprobs(
            step.prompts, step.hidden, self._model.compute_logits, self._sampler, readback
        )
        read_states(step.poolings, step.hidden, readback)
        step.ended = readback.close()
        step.hidden = step.logits = None  # the next step writes over them

    # ---- inputs ----------------------------------------------------------------------------------------------

    def _inputs(
        self, batch: InputBatch, last_tokens: np.ndarray, more: list[np.ndarray]
    ) -> tuple[StepInputs, list[torch.Tensor]]:
        """What a forward is given, and `more` arrays that are sent along."""
        columns = [batch.query_start_loc, batch.seq_lens, batch.block_tables, batch.slot_mapping]
        columns += [batch.token_ids, batch.positions, last_tokens.astype(np.int64)]
        sent = self._buffer.send(columns + more)
        query_start_loc, seq_lens, block_tables, slot_mapping, token_ids, positions, last = sent[: len(columns)]
        build = partial(
            self._attention.build_metadata,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
        )
        groups = zip(block_tables, slot_mapping, strict=True)
        first, *others = [build(block_tables=tables, slot_mapping=slots) for tables, slots in groups]
        context = ForwardContext(
            metadata=first, more_metadata=tuple(others), kv_cache=self._storage.device_pool, places=self._places
        )
        inputs = StepInputs(token_ids=token_ids, positions=positions, last_tokens=last, context=context)
        return inputs, sent[len(columns) :]

    def _samples(self) -> tuple[StepInputs, StepInputs]:
        first, second = sample_batches(self._rows.block_tables.block_size, self._rows.block_tables.num_groups)
        return self._inputs(*first, [])[0], self._inputs(*second, [])[0]

    def _sampling_batch(self, seq_ids: list[int]) -> SamplingBatch:
        key = (self._rows.generation, seq_ids)
        if self._batch is None or self._batch_key != key:
            states = [self._rows.state_of(seq_id) for seq_id in seq_ids]
            self._batch = SamplingBatch(states, self._sampler.vocab_size, self._device)
            self._batch_key = key
        return self._batch
