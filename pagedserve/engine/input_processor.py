"""From what a caller asks to a Request: tokens, limits, defaults. A mistake is a RequestError that names the field."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pagedserve.config import FrontConfig, SchedulerConfig
from pagedserve.engine.tokenizer import Tokenizer, check_unicode
from pagedserve.errors import ContextLengthError, RequestError
from pagedserve.kv_cache.geometry import Geometry
from pagedserve.log import get_logger
from pagedserve.model_files import ModelFiles
from pagedserve.sampling_params import SamplingParams
from pagedserve.sequence import IDLE_PRIORITY, Request
from pagedserve.step import MemoryPlan

log = get_logger(__name__)

# A text this long takes milliseconds to tokenize, which an event loop should not spend.
INLINE_TEXT_LENGTH = 4096
# No tokenizer of the field makes one token of so many characters on average; longer texts are refused unread.
MAX_CHARACTERS_PER_TOKEN = 64

# generation_config.json -> SamplingParams
_DEFAULT_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def default_sampling_params(files: ModelFiles, mode: str) -> dict[str, Any]:
    """Sampling defaults that the model's generation_config.json asks for; explicit fields of a request beat them.

    `mode` is `--generation-config`: "auto" or "ignore". Values that no request may have are skipped with a log line.
    """
    if mode == "ignore":
        return {}
    defaults: dict[str, Any] = {}
    for theirs, ours in _DEFAULT_FIELDS.items():
        value = files.generation_config.get(theirs)
        if value is None:
            continue
        try:
            SamplingParams(**{ours: value})
        except (RequestError, TypeError) as error:
            log.warning("generation_config.json: %s %r is ignored: %s", theirs, value, error)
            continue
        if value != getattr(SamplingParams(), ours):
            defaults[ours] = value
    return defaults


def eos_ids(files: ModelFiles, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Every id that ends a text: of the generation config, the model's config and the tokenizer."""
    found: list[int] = []
    for source in (
        files.generation_config.get("eos_token_id"),
        files.config.get("eos_token_id"),
        tokenizer.eos_token_id,
    ):
        values = source if isinstance(source, list) else [source]
        found += [value for value in values if isinstance(value, int) and not isinstance(value, bool) and value >= 0]
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class ProcessedInput:
    """A Request, and the prompt's text where the caller gave text."""

    request: Request
    prompt: str | None


class InputProcessor:
    """Makes Requests for one loaded model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        files: ModelFiles,
        plan: MemoryPlan,
        *,
        max_model_len: int,
        front: FrontConfig,
        scheduler: SchedulerConfig,
    ):
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._max_logprobs = front.max_logprobs
        self._default_timeout = scheduler.request_timeout
        self._max_num_seqs = scheduler.max_num_seqs
        self._num_blocks = plan.num_device_blocks
        self._geometry = Geometry.of(plan.spec, scheduler.max_num_batched_tokens)
        self._eos_token_ids = eos_ids(files, tokenizer)
        self._has_head = files.has_head
        vocab_size = files.config.get("vocab_size")
        # What may stand in a prompt, and what may be drawn: a model's head is often padded past its tokenizer.
        self.vocab_size: int = vocab_size if isinstance(vocab_size, int) else tokenizer.vocab_size
        self._num_drawable = min(self.vocab_size, tokenizer.vocab_size)

    def process(self, prompt: str | list[int], params: SamplingParams, **options: Any) -> ProcessedInput:
        """Tokenize and check; raises RequestError or ContextLengthError. For `options` see `process_async`."""
        options["arrival_time"] = time.monotonic()
        self._check_size(prompt)
        if isinstance(prompt, str):
            return ProcessedInput(self._request(self._tokenize(prompt), params, **options), prompt)
        return ProcessedInput(self._request(prompt, params, **options), None)

    async def process_async(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        request_id: str,
        timeout: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> ProcessedInput:
        """As `process`; a long text is tokenized in a thread, with the interpreter lock released."""
        if not isinstance(prompt, str) or len(prompt) <= INLINE_TEXT_LENGTH:
            return self.process(
                prompt, params, request_id=request_id, timeout=timeout, priority=priority, cache_salt=cache_salt
            )
        arrival_time = time.monotonic()
        self._check_size(prompt)
        token_ids = await asyncio.to_thread(self._tokenize, prompt)
        request = self._request(
            token_ids,
            params,
            request_id=request_id,
            arrival_time=arrival_time,
            timeout=timeout,
            priority=priority,
            cache_salt=cache_salt,
        )
        return ProcessedInput(request, prompt)

    def _tokenize(self, prompt: str) -> list[int]:
        check_unicode(prompt, param="prompt")
        return self._tokenizer.encode(prompt)

    def _check_size(self, prompt: object) -> None:
        if isinstance(prompt, str):
            if len(prompt) > self._max_model_len * MAX_CHARACTERS_PER_TOKEN:
                raise ContextLengthError(
                    f"the prompt has {len(prompt)} characters; this model's context is {self._max_model_len} tokens",
                    param="prompt",
                )
        elif not isinstance(prompt, list):
            raise RequestError("a prompt must be a string or a list of token ids", param="prompt")

    def _request(
        self,
        token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        arrival_time: float,
        timeout: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Request:
        if not self._has_head and params.pooling is None:
            raise RequestError("this model has no output head, so it generates nothing: it serves embeddings")
        self._check_prompt(token_ids)
        self._check_logprobs(params)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logit_bias", params.logit_bias or ())
        if params.stop and not self._tokenizer.has_texts:
            raise RequestError("stop strings need a tokenizer (--skip-tokenizer-init is set)", param="stop")
        for stop in params.stop:
            check_unicode(stop, param="stop")
        if cache_salt is not None:
            check_unicode(cache_salt, param="cache_salt")
        max_tokens = self._max_tokens(len(token_ids), params)
        changes: dict[str, Any] = {}
        if max_tokens != params.max_tokens:
            changes["max_tokens"] = max_tokens
        if params.bad_words:
            changes["bad_words_token_ids"] = self._bad_words(params.bad_words)
        if changes:
            params = dataclasses.replace(params, **changes)
        self._check_breadth(len(token_ids), max_tokens, params)
        return Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            eos_token_ids=self._eos_token_ids,
            arrival_time=arrival_time,
            deadline=self._deadline(arrival_time, timeout),
            priority=_checked_priority(priority),
            cache_salt=cache_salt,
            read_prefix_cache=params.prompt_logprobs is None
            and not (params.pooling and params.pooling.needs_all_tokens),
        )

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise RequestError("the prompt is empty", param="prompt")
        vocab_size = self.vocab_size
        for token_id in token_ids:
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"the prompt holds {token_id!r}; token ids are integers from 0 to {vocab_size - 1}",
                    param="prompt",
                )

    def _check_ids(self, param: str, token_ids: Iterable[int]) -> None:
        outside = next((token_id for token_id in token_ids if token_id >= self._num_drawable), None)
        if outside is not None:
            raise RequestError(
                f"{param} holds {outside}; token ids of this model go up to {self._num_drawable - 1}", param=param
            )

    def _check_logprobs(self, params: SamplingParams) -> None:
        for param in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, param)
            if asked is not None and asked > self._max_logprobs:
                raise RequestError(
                    f"{param} {asked} is more than this server gives, {self._max_logprobs} (--max-logprobs)",
                    param=param,
                )

    def _max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Tokens to generate; None asks for all that fit. ContextLengthError with the true numbers otherwise."""
        room = self._max_model_len - num_prompt_tokens
        wanted = params.max_tokens
        if room < 0 or (room == 0 and wanted != 0):
            raise ContextLengthError(
                f"the prompt has {num_prompt_tokens} tokens; this model's context is {self._max_model_len} tokens, "
                "prompt and output together",
                param="prompt",
            )
        if wanted is None:
            if params.beam is not None:
                room = min(room, self._beam_room(num_prompt_tokens, params.beam.width))
            return max(room, params.min_tokens)
        if wanted > room:
            raise ContextLengthError(
                f"the prompt has {num_prompt_tokens} tokens and {wanted} more were asked for, "
                f"{num_prompt_tokens + wanted} together; this model's context is {self._max_model_len} tokens",
                param="max_tokens",
            )
        return wanted

    def _beam_room(self, num_prompt_tokens: int, width: int) -> int:
        """Output tokens for which all beams are sure to be in the pool together."""

        def num_blocks(num_output_tokens: int) -> int:
            return self._geometry.num_beam_blocks(num_prompt_tokens, num_prompt_tokens + num_output_tokens, width)

        lengths = range(1, self._max_model_len + 1)
        return max(bisect_right(lengths, self._num_blocks, key=num_blocks), 1)

    def _check_breadth(self, num_prompt_tokens: int, max_tokens: int, params: SamplingParams) -> None:
        """Samples can be computed one after another where memory is short; beams need each other in every step."""
        num_sequences = params.num_sequences
        if num_sequences > self._max_num_seqs:
            raise RequestError(
                f"{num_sequences} sequences were asked for; this server runs at most {self._max_num_seqs} at once "
                "(--max-num-seqs)",
                param=_breadth_param(params),
            )
        if params.beam is not None and max_tokens > self._beam_room(num_prompt_tokens, num_sequences):
            num_tokens = num_prompt_tokens + max_tokens
            needed = self._geometry.num_beam_blocks(num_prompt_tokens, num_tokens, num_sequences)
            raise ContextLengthError(
                f"{num_sequences} beams of {num_prompt_tokens} + {max_tokens} tokens need {needed} KV blocks of "
                f"{self._geometry.block_size} tokens; this server has {self._num_blocks}",
                param="beam_width",
            )

    def _bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Each word as it is tokenized at a text's start, after a space, and within a line."""
        forms: dict[tuple[int, ...], None] = {}
        newline = self._encode_part("\n")
        for word in words:
            check_unicode(word, param="bad_words")
            bare = word.lstrip(" ")
            forms[self._encode_part(bare)] = None
            forms[self._encode_part(" " + bare)] = None
            after_newline = self._encode_part("\n" + bare)
            if after_newline[: len(newline)] == newline:
                forms[after_newline[len(newline) :]] = None
        return tuple(form for form in forms if form)

    def _encode_part(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _deadline(self, arrival_time: float, timeout: float | None) -> float | None:
        if timeout is None:
            timeout = self._default_timeout
        if timeout is None:
            return None
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < 1e9:
            raise RequestError("timeout must be a number of seconds above 0", param="timeout")
        return arrival_time + timeout


def _breadth_param(params: SamplingParams) -> str:
    if params.beam is not None:
        return "beam_width"
    return "n" if params.best_of is None else "best_of"


def _checked_priority(priority: int) -> int:
    if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**31) <= priority <= IDLE_PRIORITY:
        raise RequestError("priority must be a 32-bit integer", param="priority")
    return priority
