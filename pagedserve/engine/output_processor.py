"""From the core's columns to RequestOutputs: text, stop strings, logprobs, the end of a request.

A request's state is the whole truth about what came so far. A consumer takes what is new since it last looked, so a
slow one gets larger pieces rather than a longer queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from pagedserve import errors
from pagedserve.engine.detokenizer import TextStream
from pagedserve.engine.repetition import RepetitionDetector
from pagedserve.engine.tokenizer import Tokenizer
from pagedserve.errors import EngineDeadError, EngineStepError, PagedServeError, QueueFullError, RequestError
from pagedserve.log import get_logger
from pagedserve.messages import AbortRequests, EngineCoreOutputs, FinishedRequest, StopSequences
from pagedserve.outputs import CompletionOutput, RequestMetrics, RequestOutput
from pagedserve.sampling_params import SamplingParams
from pagedserve.sequence import FinishReason, Request
from pagedserve.step import TokenLogprobs

log = get_logger(__name__)


# The `stop_reason` of an output that ended because it went round in a circle.
REPETITION = "repetition_detected"


class Choice:
    """One output of a request as it grows."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer):
        params = request.sampling_params
        self.index = index
        self._include_stop = params.include_stop_str_in_output
        # Where the last token may be text: structured output also ends without an end token.
        is_structured = params.structured_output is not None
        self._end_token_ids = request.eos_token_ids + params.stop_token_ids if is_structured else None
        self._is_scored = params.logprobs is not None or params.beam is not None or params.num_sequences > params.n
        self._stream = TextStream(tokenizer, params, request.prompt_token_ids)
        rule = params.repetition_detection
        self._repetition = None if rule is None or params.beam is not None else RepetitionDetector(rule)
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        # How much of the above the consumer has.
        self._taken_text = 0
        self._taken_tokens = 0

    def append(
        self,
        token_ids: list[int],
        cumulative_logprob: float,
        finish_reason: str | None,
        stop_reason: int | str | None,
        logprobs: list[TokenLogprobs] | None,
    ) -> bool:
        """Take in one row; True where a stop string was found in it, which the core does not know yet."""
        if self._repetition is not None and finish_reason is None:
            count = self._repetition.feed(token_ids)
            if count is not None:
                logprobs = None if logprobs is None else logprobs[:count]
                self.append(token_ids[:count], cumulative_logprob, FinishReason.LENGTH, None, logprobs)
                if self.stop_reason is None:
                    self._finish(FinishReason.STOP, REPETITION)
                return True
        # The token that ended the output is counted, but it is no text unless the client asked to see it.
        hidden = 1 if finish_reason == FinishReason.STOP and token_ids and not self._include_stop else 0
        if hidden and self._end_token_ids is not None:
            hidden = int(token_ids[-1] in self._end_token_ids)
        update = self._stream.append(token_ids[: len(token_ids) - hidden])
        self.text += update.text
        self.cumulative_logprob = cumulative_logprob
        if update.stop is not None:
            self._extend(token_ids[: update.num_tokens], logprobs)
            self._finish(FinishReason.STOP, update.stop)
            return finish_reason is None
        self._extend(token_ids, logprobs)
        if finish_reason is None:
            return False
        last = self._stream.finish()
        self.text += last.text
        if last.stop is not None:
            self._finish(FinishReason.STOP, last.stop)
        else:
            self._finish(finish_reason, stop_reason)
        return False

    def end(self, finish_reason: str) -> None:
        """The request is over though the core sent no last row for this choice."""
        if self.finish_reason is None:
            self.text += self._stream.finish().text
            self._finish(finish_reason, None)

    def take(self, index: int) -> CompletionOutput:
        """The state, with what is new since the last call as deltas; `index` is the one that the client sees."""
        start_text, start_tokens = self._taken_text, self._taken_tokens
        self._taken_text, self._taken_tokens = len(self.text), len(self.token_ids)
        return CompletionOutput(
            index=index,
            text=self.text,
            token_ids=self.token_ids.copy(),
            logprobs=None if self.logprobs is None else self.logprobs.copy(),
            cumulative_logprob=self.cumulative_logprob if self._is_scored else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            delta_text=self.text[start_text:],
            delta_token_ids=self.token_ids[start_tokens:],
            delta_logprobs=None if self.logprobs is None else self.logprobs[start_tokens:],
        )

    def _extend(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> None:
        self.token_ids += token_ids
        if self.logprobs is not None and logprobs is not None:
            self.logprobs += logprobs[: len(token_ids)]

    def _finish(self, finish_reason: str, stop_reason: int | str | None) -> None:
        self.finish_reason = str(finish_reason)
        self.stop_reason = stop_reason


class RequestState:
    """One request until its consumer has its last output. `on_change` is called whenever there is something to take."""

    def __init__(
        self,
        request: Request,
        prompt: str | None,
        tokenizer: Tokenizer,
        *,
        public_id: str,
        on_change: Callable[[], None] | None = None,
    ):
        params = request.sampling_params
        self.request = request
        self.public_id = public_id
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._on_change = on_change
        self.choices = [Choice(index, request, tokenizer) for index in range(params.num_sequences)]
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None if params.prompt_logprobs is None else [None]
        self.pooled: bytes | None = None
        self.num_cached_tokens = 0
        # Where fewer choices are returned than computed, nobody can know which before all have ended.
        self._is_ranked = params.n < params.num_sequences
        self.metrics = RequestMetrics(arrival_time=request.arrival_time)
        self.error: PagedServeError | None = None
        self.is_finished = False
        # What metrics have counted of this request so far.
        self.counted_prompt = False
        self.counted_tokens = 0
        self.counted_time: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def params(self) -> SamplingParams:
        return self.request.sampling_params

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all choices that were computed."""
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def shows_progress(self) -> bool:
        """False where nothing may be shown before the end, because choices are still to be ranked."""
        return not self._is_ranked

    def add_row(
        self,
        choice_index: int,
        token_ids: list[int],
        cumulative_logprob: float,
        finish_reason: str | None,
        stop_reason: int | str | None,
        logprobs: list[TokenLogprobs] | None,
        now: float,
    ) -> bool:
        """One row of a step; True where a stop string ended the choice before the core did."""
        choice = self.choices[choice_index]
        if choice.finish_reason is not None:
            return False  # computed before the core heard of the stop
        if token_ids and self.metrics.first_token_time is None:
            self.metrics.first_token_time = now
        return choice.append(token_ids, cumulative_logprob, finish_reason, stop_reason, logprobs)

    def add_prompt_logprobs(self, entries: list[TokenLogprobs]) -> None:
        """The next positions of the prompt, in order."""
        if self._prompt_logprobs is not None:
            room = len(self.request.prompt_token_ids) - len(self._prompt_logprobs)
            self._prompt_logprobs += entries[:room]

    def finish(self, finished: FinishedRequest, now: float) -> None:
        """The core has no more for this request."""
        self.num_cached_tokens = finished.num_cached_tokens
        self.metrics.first_scheduled_time = finished.first_scheduled_time
        self.metrics.num_preemptions = finished.num_preemptions
        self.metrics.num_wasted_tokens = finished.num_wasted_tokens
        self.fail(error_of(finished), now)

    def fail(self, error: PagedServeError | None, now: float) -> None:
        """The end, with what went wrong or None."""
        self.error = error
        self.metrics.finished_time = now
        for choice in self.choices:
            choice.end(FinishReason.ERROR if error else FinishReason.ABORT)
        self.is_finished = True

    def notify(self) -> None:
        """Wake the consumer."""
        if self._on_change is not None:
            self._on_change()

    def take(self) -> RequestOutput:
        """Everything so far, with deltas since the last call."""
        shown = self.returned
        num_discarded_tokens = 0
        if self.is_finished and len(shown) < len(self.choices):
            num_discarded_tokens = self.num_output_tokens - sum(len(choice.token_ids) for choice in shown)
        return RequestOutput(
            request_id=self.public_id,
            prompt=self._prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=[choice.take(index) for index, choice in enumerate(shown)],
            finished=self.is_finished,
            prompt_logprobs=self._prompt_logprobs,
            pooled=self.pooled,
            num_cached_tokens=self.num_cached_tokens,
            num_discarded_tokens=num_discarded_tokens,
            metrics=self.metrics,
            error=None if self.error is None else str(self.error),
        )

    @property
    def returned(self) -> list[Choice]:
        """What the client gets: all choices, or the `n` of highest log probability a token (OpenAI's best_of)."""
        params = self.request.sampling_params
        if not self._is_ranked or params.beam is not None:
            return self.choices[: params.n]
        ranked = sorted(self.choices, key=lambda c: -c.cumulative_logprob / max(len(c.token_ids), 1))
        return ranked[: params.n]


@dataclass(slots=True)
class Processed:
    """What a step's outputs meant: requests with news, and what the core must hear of them."""

    changed: list[RequestState]
    messages: list[StopSequences | AbortRequests]


class OutputProcessor:
    """All requests that are under way."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._states: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def add(
        self, request: Request, prompt: str | None, public_id: str, on_change: Callable[[], None] | None = None
    ) -> RequestState:
        """Begin to follow a request."""
        state = RequestState(request, prompt, self._tokenizer, public_id=public_id, on_change=on_change)
        self._states[request.request_id] = state
        return state

    def remove(self, request_id: str) -> RequestState | None:
        """Forget a request: later rows for it are dropped."""
        return self._states.pop(request_id, None)

    def process(self, outputs: EngineCoreOutputs) -> Processed:
        """Spread the columns over the requests. Rows of unknown requests belong to aborted ones and are dropped."""
        now = time.monotonic()
        changed: dict[str, RequestState] = {}
        stopped: list[tuple[str, int]] = []
        broken: list[str] = []
        for request_id, positions in outputs.prompt_logprobs.items():
            if (state := self._states.get(request_id)) is not None:
                state.add_prompt_logprobs(positions)
        for request_id, vector in outputs.pooled.items():
            if (state := self._states.get(request_id)) is not None:
                state.pooled = vector
        rows = zip(
            outputs.request_ids,
            outputs.choice_indices,
            outputs.token_ids,
            outputs.cumulative_logprobs,
            outputs.finish_reasons,
            outputs.stop_reasons,
            strict=True,
        )
        for row, (request_id, choice_index, token_ids, logprob, finish_reason, stop_reason) in enumerate(rows):
            state = self._states.get(request_id)
            if state is None:
                continue
            try:
                entries = outputs.logprobs.get(row)
                is_stopped = state.add_row(choice_index, token_ids, logprob, finish_reason, stop_reason, entries, now)
            except Exception:
                log.exception("the output of %s could not be processed; it ends", request_id)
                state.fail(EngineStepError("the output could not be turned into text"), now)
                changed[request_id] = self._states.pop(request_id)
                broken.append(request_id)
                continue
            if is_stopped:
                stopped.append((request_id, choice_index))
            if state.shows_progress:
                changed[request_id] = state
        for finished in outputs.finished:
            state = self._states.pop(finished.request_id, None)
            if state is not None:
                state.finish(finished, now)
                changed[finished.request_id] = state
        messages: list[StopSequences | AbortRequests] = []
        if stopped:
            message = StopSequences(request_ids=[s[0] for s in stopped], choice_indices=[s[1] for s in stopped])
            messages.append(message)
        if broken:
            messages.append(AbortRequests(request_ids=broken))
        return Processed(list(changed.values()), messages)

    def fail_all(self, reason: str) -> list[RequestState]:
        """The core is gone: every request ends with an EngineDeadError of its own."""
        states, self._states = list(self._states.values()), {}
        now = time.monotonic()
        for state in states:
            state.fail(EngineDeadError(reason), now)
        return states


def error_of(finished: FinishedRequest) -> PagedServeError | None:
    """The exception that a FinishedRequest stands for, if any."""
    if finished.error_kind is None:
        return None
    message = finished.error or "the request failed"
    if finished.error_kind == QueueFullError.__name__:
        return QueueFullError(message, retry_after=finished.retry_after or 1)
    kind = getattr(errors, finished.error_kind, None)
    if isinstance(kind, type) and issubclass(kind, RequestError):
        return kind(message, param=finished.error_param)
    if isinstance(kind, type) and issubclass(kind, PagedServeError):
        return kind(message)
    return EngineStepError(message)
