"""Grammars at work (llguidance): compiled off the core's loop, kept, and followed token by token.

A request with a StructuredOutput waits in the scheduler until its grammar is compiled; what cannot be compiled, or not
in time, ends the request with the reason. From then on a Matcher a sequence says which tokens are possible.
"""

from __future__ import annotations

import os
import queue
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pagedserve.config import StructuredOutputConfig, parse_bytes
from pagedserve.engine.grammars import PARAM, to_lark
from pagedserve.errors import RequestError
from pagedserve.log import get_logger
from pagedserve.sampling_params import StructuredOutput
from pagedserve.sequence import Request

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from pagedserve.engine.tokenizer import Tokenizer

log = get_logger(__name__)

# What one mask may cost: an ambiguous grammar ends its request before its masks take longer than a step may.
_LIMITS = {"max_items_in_row": 500, "step_max_items": 10_000, "step_lexer_fuel": 100_000, "verbose_errors": False}
# The compiler recurses along chains of rules and references; within the size limit they fit into this much stack.
_STACK_BYTES = 512 << 20
_NUM_COMPILERS = 2
# From so many rows on, a pool of threads is worth its hand-over, where cores are left for it.
_MIN_PARALLEL_ROWS = 8
_MIN_CORES = 8
_MAX_REASON_LENGTH = 400
# Where a message of llguidance begins to quote the grammar that we made, or its own state.
_NOISE = re.compile(r"\n\s*\d+ \| |<state>|<non-verbose/>|<backtrace>")
_PLACE = re.compile(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?")
_HINTS = {
    "Enable 'coerce_one_of' option to approximate oneOf with anyOf": "its arms must exclude each other; use anyOf"
}


class TokenTable:
    """A tokenizer as llguidance sees it: the bytes of each token, and behind the last one an end that no model draws.

    That end stands for whatever may end a request's text, so grammars need not know which ids do.
    """

    def __init__(self, tokenizer: Tokenizer):
        from llguidance import LLTokenizer, TokenizerWrapper  # no start waits for it

        if not tokenizer.has_texts:
            raise RequestError("structured output needs a tokenizer (--skip-tokenizer-init is set)", param=PARAM)
        if tokenizer.token_bytes.separator:
            raise RequestError("this model's tokenizer has no decoder; its texts cannot be constrained", param=PARAM)
        self.tokenizer = tokenizer
        self.end_id = tokenizer.vocab_size
        self.num_words = (self.end_id + 32) // 32
        self.special_tokens = {text: i for i in tokenizer.special_ids if (text := tokenizer.id_to_token(i))}
        # Attributes that TokenizerWrapper reads.
        self.bos_token_id = tokenizer.bos_token_id
        self.eos_token_id = self.end_id
        self.special_token_ids = [*sorted(tokenizer.special_ids), self.end_id]
        self.tokens = [tokenizer.id_to_bytes(i) for i in range(self.end_id)] + [b"<end>"]
        self._greedy: LLTokenizer | None = None
        self.llg = self._greedy = LLTokenizer(TokenizerWrapper(self), eos_token=[self.end_id])

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text that a grammar forces: the model's own where they are exactly this text."""
        if self._greedy is None:
            return []  # only asked whether bytes are taken
        try:
            ids = self.tokenizer.encode(text.decode("utf-8"), add_special_tokens=False)
        except (UnicodeDecodeError, RequestError):
            ids = []
        if b"".join(map(self.tokenizer.id_to_bytes, ids)) == text and not self.tokenizer.special_ids & set(ids):
            return ids
        return self._greedy.greedy_tokenize(text.decode("utf-8", "replace"))


class Matcher:
    """The constraint of one sequence (`scheduler.constraints.Constraint`)."""

    __slots__ = (
        *("_end_ids", "_forced", "_is_text", "_llg", "_marker", "_max_free", "_min_tokens", "_num_followed"),
        *("_opening", "_stop_ids", "_table", "_tail", "error"),
    )

    def __init__(self, llg: LLMatcher, table: TokenTable, request: Request):
        params = request.sampling_params
        assert params.structured_output is not None
        output = params.structured_output
        marker = output.after_text
        self._llg = llg
        self._table = table
        self._marker = None if marker is None else marker.encode()
        # What was generated before the marker, as far back as its beginning can reach; None from the marker on.
        self._tail = None if marker is None else b""
        # The free text must begin with this, as far as it is still to be seen.
        self._opening = None if output.opening is None else output.opening.encode()
        self._max_free = output.max_free_tokens
        # What is left of the marker while it is forced.
        self._forced: tuple[int, ...] = ()
        self._is_text = output.kind == "text"
        self._min_tokens = params.min_tokens
        known = [i for i in (*request.eos_token_ids, *params.stop_token_ids) if i < table.end_id]
        self._end_ids = tuple(dict.fromkeys(known))
        # Those that end the text wherever it may end; the others are for where nothing else can follow.
        self._stop_ids = tuple(i for i in self._end_ids if not params.ignore_eos or i in params.stop_token_ids)
        self._num_followed = 0
        self.error: str | None = None
        self._force_if_used_up()

    @property
    def is_complete(self) -> bool:
        """True where nothing can follow."""
        return self._tail is None and not self._is_text and self._llg.is_stopped() and not self._llg.is_error()

    def follow(self, token_ids: list[int], num_prompt_tokens: int) -> None:
        """Take in the tokens behind those that were followed before."""
        for token_id in token_ids[num_prompt_tokens + self._num_followed :]:
            self._num_followed += 1
            if self._forced:
                self._forced = self._forced[1:]
                if not self._forced:
                    self._tail = None
            elif self._tail is not None:
                self._look_for_marker(token_id)
                self._force_if_used_up()
            elif not self._is_text and not self._llg.consume_token(token_id):
                self._fail()

    def fork(self) -> Matcher:
        """A copy with the same past."""
        twin = object.__new__(Matcher)
        for name in Matcher.__slots__:
            setattr(twin, name, getattr(self, name))
        twin._llg = self._llg.deep_copy()
        return twin

    @property
    def is_free(self) -> bool:
        """True where the grammar does not hold yet, or never."""
        return self._tail is not None or self._is_text

    def fill(self, row: np.ndarray) -> None:
        """The grammar's own mask into `row`, uint32 [num_words]."""
        self._llg.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

    def finish(self, row: np.ndarray) -> None:
        """Make the grammar's mask one of the model's tokens: end tokens where the text may end, and only there."""
        if self._forced:
            row.fill(0)
            _set(row, self._forced[:1])
            return
        if self._is_text:
            row.fill(0xFFFFFFFF)
            can_end = self._num_followed >= self._min_tokens
            held = [i for i in self._end_ids if i not in self._stop_ids] if can_end else self._end_ids
            _clear(row, (self._table.end_id, *held))
            return
        if self._tail is not None:
            row.fill(0xFFFFFFFF)
            _clear(row, (self._table.end_id, *self._end_ids))
            return
        if self._llg.is_error():
            self._fail()
            row.fill(0xFFFFFFFF)  # what is drawn is thrown away with the request
            return
        can_end = _has(row, self._table.end_id)
        taken = [i for i in self._end_ids if _has(row, i)]
        _clear(row, (self._table.end_id, *taken))
        if can_end and self._num_followed >= self._min_tokens:
            _set(row, self._stop_ids)
        if (taken or can_end) and not row.any():
            # Nothing else can follow: the end that was held back, or a stop token that the grammar needs as text.
            _set(row, self._end_ids if can_end else taken)
            if can_end and not self._end_ids:
                self.error = "the grammar is complete, and this model has no token that ends a text"

    def _look_for_marker(self, token_id: int) -> None:
        assert self._tail is not None and self._marker is not None
        text = self._tail + self._table.tokenizer.id_to_bytes(token_id)
        if self._opening is not None:
            begun = text.lstrip()
            if not begun.startswith(self._opening):
                # Either more of it is to come, or this is an answer without a free part.
                self._tail = text if self._opening.startswith(begun) else None
                return
            self._opening = None
        place = text.find(self._marker)
        if place < 0:
            self._tail = text[-(len(self._marker) - 1) :] if len(self._marker) > 1 else b""
            return
        self._tail = None
        # A token may reach beyond the marker; blanks there are nothing, anything else is the grammar's first text.
        rest = text[place + len(self._marker) :].lstrip()
        if rest and not self._is_text:
            ids = self._table.llg.tokenize_bytes(rest)
            if self._llg.try_consume_tokens(ids) < len(ids):
                self.error = "the text that came with the marker does not begin as the grammar says"

    def _force_if_used_up(self) -> None:
        """Force the marker where the free text has had its tokens."""
        if self._tail is None or self._max_free is None or self._opening is not None or self._forced:
            return
        if self._num_followed >= self._max_free:
            assert self._marker is not None
            marker = self._marker.decode()
            special = self._table.special_tokens.get(marker)
            encode = self._table.tokenizer.encode
            self._forced = tuple(encode(marker, add_special_tokens=False)) if special is None else (special,)

    def _fail(self) -> None:
        reason = _one_line(self._llg.get_error())
        self.error = self.error or f"the grammar cannot go on after {self._num_followed} tokens: {reason}"


class StructuredOutputs:
    """The grammars of one core: compiles them in threads, keeps those last used, and makes masks.

    `load_tokenizer` is called in a thread when the first grammar comes.
    """

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], config: StructuredOutputConfig):
        self._load_tokenizer = load_tokenizer
        self._max_size = parse_bytes(config.max_grammar_size, "--max-grammar-size")
        self._timeout = config.grammar_timeout
        self._cache_size = config.grammar_cache_size
        # Grammars without what is free before them, which no compiler sees; a refusal is as good to know as a grammar.
        self._cache: OrderedDict[StructuredOutput, LLMatcher | RequestError] = OrderedDict()
        self._waiting: dict[StructuredOutput, dict[str, tuple[Request, float]]] = {}
        self._jobs: queue.SimpleQueue[StructuredOutput] = queue.SimpleQueue()
        self._results: deque[tuple[StructuredOutput, LLMatcher | RequestError]] = deque()
        self._has_result = threading.Event()
        self._threads: list[threading.Thread] = []
        self._table: TokenTable | None = None
        self._table_since = 0.0
        self._table_lock = threading.Lock()
        self._executor: LLExecutor | None = None

    @property
    def num_pending(self) -> int:
        """Requests that wait for a grammar."""
        return sum(map(len, self._waiting.values()))

    def begin(self, request: Request) -> Matcher | None:
        """The request's constraint where its grammar is known; None where it is being compiled now.

        Raises RequestError for one that is too large or known to be bad.
        """
        output = request.sampling_params.structured_output
        assert output is not None
        texts = (output.value, output.prefix, output.suffix, output.whitespace, output.alternative)
        size = sum(len(text.encode("utf-8", "replace")) for text in texts if text)
        if size > self._max_size:
            raise RequestError(
                f"the {output.kind} has {size} bytes; at most {self._max_size} are taken (--max-grammar-size)",
                param=PARAM,
            )
        key = replace(output, after_text=None, opening=None, max_free_tokens=None)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._matcher(self._cache[key], request)
        if key not in self._waiting:
            self._waiting[key] = {}
            self._start_threads()
            self._jobs.put(key)
        self._waiting[key][request.request_id] = (request, time.monotonic())
        return None

    def forget(self, request_ids: Sequence[str]) -> None:
        """Nobody waits for these any more; a grammar that is being compiled is kept all the same."""
        for waiting in self._waiting.values():
            for request_id in request_ids:
                waiting.pop(request_id, None)

    def take_ready(self) -> list[tuple[str, Matcher | RequestError]]:
        """Requests that waited long enough: with their constraint, or with the reason why there is none."""
        ready: list[tuple[str, Matcher | RequestError]] = []
        self._has_result.clear()
        while self._results:
            key, result = self._results.popleft()
            self._keep(key, result)
            for request_id, (request, _) in self._waiting.pop(key, {}).items():
                try:
                    ready.append((request_id, self._matcher(result, request)))
                except RequestError as error:
                    ready.append((request_id, error))
        return ready + self._late()

    def wait(self, seconds: float) -> bool:
        """Wait for a grammar, at most so long; False at once where none is pending."""
        if not self.num_pending:
            return False
        self._has_result.wait(seconds)
        return True

    def fill_masks(self, matchers: Sequence[Matcher]) -> bytearray:
        """Masks as `step.SamplingInput.token_masks` has them, a row a matcher."""
        assert self._table is not None
        buffer = bytearray(4 * len(matchers) * self._table.num_words)
        masks = np.frombuffer(buffer, dtype=np.uint32).reshape(len(matchers), -1)
        bound = [(matcher, i) for i, matcher in enumerate(matchers) if not matcher.is_free]
        if len(bound) < _MIN_PARALLEL_ROWS or (os.cpu_count() or 1) < _MIN_CORES:
            for matcher, i in bound:
                matcher.fill(masks[i])
        else:
            from llguidance import LLExecutor

            self._executor = self._executor or LLExecutor()
            self._executor.unsafe_compute_mask_ptr(
                [(matcher._llg, i) for matcher, i in bound], masks.ctypes.data, 4 * self._table.num_words, len(matchers)
            )
        for i, matcher in enumerate(matchers):
            matcher.finish(masks[i])
        return buffer

    # -- compiling -----------------------------------------------------------------------------------------------------

    def _matcher(self, found: LLMatcher | RequestError, request: Request) -> Matcher:
        if isinstance(found, RequestError):
            raise RequestError(found.message, param=found.param)
        assert self._table is not None
        matcher = Matcher(found.deep_copy(), self._table, request)
        if request.sampling_params.beam is not None and not matcher._end_ids:
            raise RequestError("beam search needs a token that ends a text, and this model has none", param=PARAM)
        return matcher

    def _keep(self, key: StructuredOutput, result: LLMatcher | RequestError) -> None:
        self._cache[key] = result
        self._cache.move_to_end(key)
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)

    def _late(self) -> list[tuple[str, Matcher | RequestError]]:
        """Those whose grammar takes too long. The time begins when the tokenizer, loaded once, is there."""
        late: list[tuple[str, Matcher | RequestError]] = []
        if self._table is None:
            return late
        limit = time.monotonic() - self._timeout
        for waiting in self._waiting.values():
            for request_id, (_, since) in list(waiting.items()):
                if max(since, self._table_since) < limit:
                    del waiting[request_id]
                    reason = f"the grammar was not compiled within {self._timeout:g} s (--grammar-timeout)"
                    late.append((request_id, RequestError(reason, param=PARAM)))
        return late

    def _start_threads(self) -> None:
        if self._threads:
            return
        outer = threading.stack_size(_STACK_BYTES)
        try:
            for number in range(_NUM_COMPILERS):
                thread = threading.Thread(target=self._work, name=f"grammars-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        finally:
            threading.stack_size(outer)

    def _work(self) -> None:
        while True:
            key = self._jobs.get()
            result: LLMatcher | RequestError
            try:
                result = self._compile(key)
            except RequestError as error:
                result = error
            except Exception:
                log.exception("a grammar could not be compiled")
                result = RequestError(f"the {key.kind} cannot be compiled; the server's log has details", param=PARAM)
            self._results.append((key, result))
            self._has_result.set()

    def _compile(self, key: StructuredOutput) -> LLMatcher:
        with self._table_lock:
            if self._table is None:
                started = time.monotonic()
                self._table = TokenTable(self._load_tokenizer())
                self._table_since = time.monotonic()
                log.info("vocabulary for grammars took %.2f s", self._table_since - started)
        from llguidance import LLMatcher, LLParserLimits

        grammar = to_lark(key, self._table.special_tokens)
        matcher = LLMatcher(self._table.llg, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))
        row = np.zeros(self._table.num_words, dtype=np.uint32)
        if not matcher.is_error():
            # A grammar without a first token, or too complex for one, is found here and not in a step.
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        has_no_text = matcher.get_error().startswith("NoExtension")
        if matcher.is_error() and not has_no_text:
            raise RequestError(f"the {key.kind} cannot be used: {_one_line(matcher.get_error())}", param=PARAM)
        _clear(row, (self._table.end_id,))
        if has_no_text or not row.any():
            raise RequestError(f"the {key.kind} cannot be used: no text of this model's tokens fits it", param=PARAM)
        return matcher


def _one_line(message: str) -> str:
    """The reason in a compiler's message, without the state that it may carry along."""
    for theirs, ours in _HINTS.items():
        message = message.replace(theirs, ours)
    line = " ".join(_NOISE.split(message)[0].split())
    line = _PLACE.sub("", line)
    return line if len(line) <= _MAX_REASON_LENGTH else line[:_MAX_REASON_LENGTH] + "..."


def _has(row: np.ndarray, token_id: int) -> bool:
    return bool(row[token_id >> 5] & np.uint32(1 << (token_id & 31)))


def _set(row: np.ndarray, token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        row[token_id >> 5] |= np.uint32(1 << (token_id & 31))


def _clear(row: np.ndarray, token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        row[token_id >> 5] &= np.uint32(0xFFFFFFFF ^ (1 << (token_id & 31)))
