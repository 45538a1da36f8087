"""What becomes of a step that runs out of memory: it runs again in parts, and costs only what does not fit alone.

A forward writes keys and values where they belong, the same ones each time, and rows only expect a token until the
results are asked for; so a step that failed halfway can be repeated piece by piece. That is done when it should draw:
then all tokens before its own are known, and no later step is on its way. (Where a thread computes, as a CPU's may, it
is too late when a failure is noticed.) Anything else that fails is told on; where the device itself is gone, everybody
had better know.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pagedserve.errors import DeviceLostError
from pagedserve.log import get_logger
from pagedserve.step import ModelRunnerOutput, SamplingInput, SchedulerOutput
from pagedserve.worker.device import Device, is_out_of_memory
from pagedserve.worker.model_runner import ModelRunner, RunningStep
from pagedserve.worker.rows import Rows

logger = get_logger(__name__)

NO_MEMORY = "the device has no memory left to compute this request, even alone; try again later, or with less"
# A server short of memory says so every so many seconds, not every step.
SECONDS_BETWEEN_WARNINGS = 10.0


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one sequence of a step."""

    place: int  # of the sequence in the batch
    start: int  # tokens of it that the step computes before
    count: int


@dataclass(slots=True)
class GuardedStep:
    """A step of a GuardedRunner: `running`, or without memory already."""

    output: SchedulerOutput
    running: RunningStep | None
    result: ModelRunnerOutput | None = None


class GuardedRunner:
    """A ModelRunner whose steps always come to an end. Raises DeviceLostError when no step ever will again."""

    def __init__(self, runner: ModelRunner, rows: Rows, device: Device) -> None:
        self._runner = runner
        self._rows = rows
        self._device = device
        self._warned_at = -SECONDS_BETWEEN_WARNINGS

    def submit(self, output: SchedulerOutput) -> GuardedStep:
        """See ModelRunner.submit."""
        try:
            return GuardedStep(output, self._runner.submit(output))
        except Exception as error:
            self._examine(error)
            return GuardedStep(output, None)

    def sample(self, step: GuardedStep, sampling: SamplingInput) -> None:
        """See ModelRunner.sample; a step that found no memory runs again here, in parts."""
        if step.running is not None:
            try:
                self._runner.sample(step.running, sampling)
                error = step.running.error
            except Exception as raised:
                error = raised
            if error is None:
                return
            self._examine(error)
            self._runner.withdraw(step.running)
        step.running = None
        step.result = self._in_parts(step.output, sampling)

    def result(self, step: GuardedStep) -> ModelRunnerOutput:
        """See ModelRunner.result."""
        if step.result is not None:
            return step.result
        try:
            assert step.running is not None, "sample comes first"
            return self._runner.result(step.running)
        except Exception as error:
            self._examine(error)
            raise

    def capture_next(self) -> bool:
        """See StepGraph.capture_next."""
        return self._runner.capture_next()

    def _examine(self, error: BaseException) -> None:
        """Returns if there was only too little memory; raises otherwise."""
        if reason := self._device.why_lost():
            raise DeviceLostError(f"the device is lost: {reason}") from error
        if not is_out_of_memory(error):
            raise error
        self._device.release_caches()

    def _in_parts(self, output: SchedulerOutput, sampling: SamplingInput) -> ModelRunnerOutput:
        whole = [Piece(i, 0, count) for i, count in enumerate(output.num_scheduled)]
        todo = deque(halves(whole))
        result = ModelRunnerOutput(step_id=output.step_id)
        num_parts = 0
        has_dropped = False
        while todo:
            part = [piece for piece in todo.popleft() if output.seq_ids[piece.place] not in result.errors]
            if not part:
                continue
            lengths = self._rows.num_tokens.copy()
            try:
                merge(result, self._run(*part_of(output, sampling, part)))
                num_parts += 1
            except Exception as error:
                self._examine(error)
                self._rows.num_tokens[:] = lengths
                if len(pieces := halves(part)) > 1:
                    todo.extendleft(reversed(pieces))
                elif not has_dropped:
                    # What captured steps hold is worth less than a request.
                    self._runner.graph.drop()
                    self._device.release_caches()
                    has_dropped = True
                    todo.appendleft(part)
                else:
                    self._give_up(output, part[0], result)
        if time.monotonic() - self._warned_at >= SECONDS_BETWEEN_WARNINGS:
            self._warned_at = time.monotonic()
            logger.warning(
                "a step of %d tokens and %d sequences found no memory and ran in %d parts, without %d of them; lower "
                "--max-num-batched-tokens, --max-num-seqs or --gpu-memory-utilization",
                output.num_tokens,
                len(output.seq_ids),
                num_parts,
                len(result.errors),
            )
        return result

    def _run(self, output: SchedulerOutput, sampling: SamplingInput) -> ModelRunnerOutput:
        running = self._runner.submit(output)
        self._runner.sample(running, sampling)
        return self._runner.result(running)

    def _give_up(self, output: SchedulerOutput, piece: Piece, result: ModelRunnerOutput) -> None:
        seq_id = output.seq_ids[piece.place]
        result.errors[seq_id] = NO_MEMORY
        result.errors.update((child, NO_MEMORY) for child, parent in output.shared_logits if parent == seq_id)


def halves(part: Sequence[Piece]) -> list[list[Piece]]:
    """The part in two of about equally many tokens, no token twice; itself where it is one token."""
    total = sum(piece.count for piece in part)
    if total == 1:
        return [list(part)]
    room, first, second = total // 2, [], []
    for piece in part:
        taken = min(piece.count, room)
        room -= taken
        if taken:
            first.append(Piece(piece.place, piece.start, taken))
        if taken < piece.count:
            second.append(Piece(piece.place, piece.start + taken, piece.count - taken))
    return [first, second]


def part_of(
    output: SchedulerOutput, sampling: SamplingInput, part: Sequence[Piece]
) -> tuple[SchedulerOutput, SamplingInput]:
    """A step of these pieces alone, after the rows have taken the whole step's differences in."""
    places = [piece.place for piece in part]
    seq_ids = [output.seq_ids[i] for i in places]
    # Only the last piece of a sequence is sampled, and children share the logits of nothing else.
    last = {
        output.seq_ids[piece.place] for piece in part if piece.start + piece.count == output.num_scheduled[piece.place]
    }
    shared = [(child, parent) for child, parent in output.shared_logits if parent in last]
    drawn = last | {child for child, _ in shared}
    masked = [i for i, seq_id in enumerate(sampling.masked_seq_ids) if seq_id in drawn]
    width = len(sampling.token_masks) // max(len(sampling.masked_seq_ids), 1)
    return (
        SchedulerOutput(
            step_id=output.step_id,
            seq_ids=seq_ids,
            num_scheduled=[piece.count for piece in part],
            num_computed=[output.num_computed[piece.place] + piece.start for piece in part],
            new_block_ids=[[] for _ in part],
            shared_logits=shared,
        ),
        SamplingInput(
            step_id=output.step_id,
            masked_seq_ids=[sampling.masked_seq_ids[i] for i in masked],
            token_masks=b"".join(bytes(sampling.token_masks[i * width : (i + 1) * width]) for i in masked),
        ),
    )


def merge(result: ModelRunnerOutput, part: ModelRunnerOutput) -> None:
    """Adds what a part has produced, in its order."""
    result.seq_ids += part.seq_ids
    result.sampled_token_ids += part.sampled_token_ids
    result.sampled_logprobs += part.sampled_logprobs
    for seq_id, entries in part.prompt_logprobs.items():
        result.prompt_logprobs.setdefault(seq_id, []).extend(entries)
    for whole, more in (
        (result.logprobs, part.logprobs),
        (result.candidates, part.candidates),
        (result.pooled, part.pooled),
        (result.errors, part.errors),
    ):
        whole.update(more)  # type: ignore[arg-type]
    result.forward_seconds += part.forward_seconds
