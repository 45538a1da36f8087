"""SamplingParams: how tokens are drawn and when a sequence stops. Validated once, then immutable."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pagedserve.errors import RequestError
from pagedserve.pooling_params import PoolingParams

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 4096
MAX_N = 256
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 256
MAX_TOKEN_ID_LIST = 4096
MAX_PATTERN_SIZE = 256
MAX_PATTERN_COUNT = 1024
MAX_SEED = 2**63 - 1

STRUCTURED_OUTPUT_KINDS = ("json_object", "json_schema", "regex", "choice", "grammar", "structural_tag", "tags", "text")

# Below this, temperature means greedy: dividing logits by it would overflow half precision (C029).
GREEDY_TEMPERATURE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """Beam search (Sutskever et al. 2014), scored as transformers does: sum of logprobs / length ** length_penalty.

    The length counts generated tokens only. The search knows tokens, not text: a stop string cuts a returned beam where
    it appears, and changes neither the search nor the beam's score; stop tokens end beams. `early_stopping`: True ends
    when `width` beams are finished, False when no live beam can be expected to win, "never" when none can win at all.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        _require(_is_int(self.width) and 1 <= self.width <= 64, "beam_width must be between 1 and 64", "beam_width")
        _number("length_penalty", self.length_penalty, -10.0, 10.0)
        _require(
            self.early_stopping in (True, False, "never"),
            'early_stopping must be true, false or "never"',
            "early_stopping",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionDetection:
    """An output ends that ends in `min_count` copies of one pattern of min_pattern_size to max_pattern_size tokens."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 3

    def __post_init__(self) -> None:
        name = "repetition_detection"
        _integer(f"{name}.max_pattern_size", self.max_pattern_size, 1, MAX_PATTERN_SIZE)
        _integer(f"{name}.min_pattern_size", self.min_pattern_size, 1, self.max_pattern_size)
        _integer(f"{name}.min_count", self.min_count, 2, MAX_PATTERN_COUNT)


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """What the text must look like: every token that would leave the grammar is impossible. Make one by its kind:

    | kind | value | the text is |
    |---|---|---|
    | json_object | empty | any JSON object |
    | json_schema | the schema, as JSON | JSON valid under the schema, properties in the schema's order |
    | regex | the pattern | a full match |
    | choice | a JSON list of strings | one of them |
    | grammar | Lark (llguidance's dialect), or GBNF / EBNF with `::=` | a sentence |
    | structural_tag | {"structures": [{begin, schema, end}], "triggers": [...]} as JSON | free, constrained in tags |
    | tags | {"tags": [{begin, schema, end}], "separator": str, "max": int or null} as JSON | 1 to max of the tags |
    | text | empty | anything; for what the fields below say about the beginning |

    `prefix` and `suffix` are text that must stand before and after; in them, as in the begin and end of tags, the
    model's special tokens may be written as text. `whitespace` is a regex for the gaps between JSON tokens: None is a
    bounded default (nothing, a space, or a newline with some indentation), "" none at all. With `after_text` the text
    is free, but cannot end, until that marker (such as "</think>") was generated; the grammar holds for what follows.
    With `thoughts` the text may begin with something free between these two markers. `alternative` is a Lark grammar
    (its first line being the rule `start`) of what the text may be instead, such as tool calls; the two must differ in
    how they begin.
    After `max_free_tokens` of such free text the marker is forced. With `opening`, text without that beginning has no
    free part: it is for kind text, where a model may or may not begin with "<think>".
    """

    kind: str
    value: str = ""
    prefix: str = ""
    suffix: str = ""
    whitespace: str | None = None
    after_text: str | None = None
    thoughts: tuple[str, str] | None = None
    alternative: str | None = None
    opening: str | None = None
    max_free_tokens: int | None = None

    def __post_init__(self) -> None:
        name = "structured_output"
        kinds = ", ".join(STRUCTURED_OUTPUT_KINDS)
        _require(self.kind in STRUCTURED_OUTPUT_KINDS, f"{name}: kind must be one of {kinds}", name)
        for field in ("value", "prefix", "suffix"):
            _require(isinstance(getattr(self, field), str), f"{name}: {field} must be a string", name)
        for field in ("whitespace", "after_text", "alternative", "opening"):
            _require(isinstance(getattr(self, field), str | None), f"{name}: {field} must be a string or null", name)
        _require(self.kind in ("json_object", "text") or bool(self.value), f"{name}: the {self.kind} is empty", name)
        is_pair = self.thoughts is None or (isinstance(self.thoughts, tuple) and len(self.thoughts) == 2)
        _require(is_pair and all(self.thoughts or ("x",)), f"{name}: thoughts must be two markers", name)
        _require(self.after_text != "", f"{name}: after_text must not be empty", name)
        _require(self.opening is None or self.kind == "text", f"{name}: opening is for kind text", name)
        if self.max_free_tokens is not None:
            _integer("max_free_tokens", self.max_free_tokens, 0, 2**31 - 1)
            _require(self.after_text is not None, f"{name}: max_free_tokens needs after_text", name)

    @classmethod
    def json_object(cls, **options: str | None) -> StructuredOutput:
        """Any JSON object. `options` here and below: prefix, suffix, whitespace, after_text."""
        return cls(kind="json_object", **options)

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | bool | str, **options: str | None) -> StructuredOutput:
        """JSON valid under `schema` (as an object, or as JSON text)."""
        return cls(kind="json_schema", value=schema if isinstance(schema, str) else _json(schema), **options)

    @classmethod
    def regex(cls, pattern: str, **options: str | None) -> StructuredOutput:
        """A full match of `pattern` (Rust's regex syntax, without look-around and back-references)."""
        return cls(kind="regex", value=pattern, **options)

    @classmethod
    def choice(cls, choices: Sequence[str], **options: str | None) -> StructuredOutput:
        """Exactly one of `choices`."""
        return cls(kind="choice", value=_json(list(choices)) if choices else "", **options)

    @classmethod
    def grammar(cls, text: str, **options: str | None) -> StructuredOutput:
        """A sentence of a Lark or GBNF grammar."""
        return cls(kind="grammar", value=text, **options)

    @classmethod
    def structural_tag(cls, tag: dict[str, Any] | str, **options: str | None) -> StructuredOutput:
        """Free text, in which each trigger begins one of the structures."""
        return cls(kind="structural_tag", value=tag if isinstance(tag, str) else _json(tag), **options)

    @classmethod
    def tags(
        cls, tags: Sequence[dict[str, Any]], *, separator: str = "", max: int | None = None, **options: str | None
    ) -> StructuredOutput:
        """One to `max` (None: any number) of `tags`, each text `begin`, JSON under `schema`, text `end`.

        This is what forced tool calls look like: a tag a tool, its name in `begin`, its parameters as `schema`.
        """
        value = {"tags": list(tags), "separator": separator, "max": max}
        return cls(kind="tags", value=_json(value) if tags else "", **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw tokens for one request.

    `n` choices are returned of `best_of` computed. temperature 0 is greedy; top_k 0 or -1 is off. `logprobs=k` reports
    the k most likely tokens at each step beside the drawn one, as log-softmax of the model's raw logits
    (before temperature, penalties and filters). Raises RequestError for a value out of range.
    """

    n: int = 1
    best_of: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    # Special tokens that show in the text all the same, for parsers of tool calls and reasoning read them.
    shown_special_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    # Strings as the client sent them; the input processor turns them into `bad_words_token_ids`.
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    beam: BeamParams | None = None
    structured_output: StructuredOutput | None = None
    repetition_detection: RepetitionDetection | None = None
    # A vector of the prompt instead of tokens; goes with max_tokens 0 and one sequence.
    pooling: PoolingParams | None = None

    def __post_init__(self) -> None:
        # Lists are what clients and JSON have; tuples are what an immutable object should hold.
        for name in ("stop", "stop_token_ids", "bad_words"):
            value = getattr(self, name)
            if value is None:
                object.__setattr__(self, name, ())
            elif isinstance(value, str):
                object.__setattr__(self, name, (value,))
            elif isinstance(value, Sequence):
                object.__setattr__(self, name, tuple(value))
        if isinstance(self.allowed_token_ids, list):
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        _check_counts(self)
        _check_distribution(self)
        _check_stopping(self)
        _check_token_lists(self)
        _require(
            isinstance(self.structured_output, StructuredOutput | None),
            "structured_output must be a StructuredOutput",
            "structured_output",
        )

    @property
    def is_greedy(self) -> bool:
        """True where the most likely token is taken whatever the seed."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def num_sequences(self) -> int:
        """Sequences that the engine computes for this request."""
        if self.beam is not None:
            return self.beam.width
        return self.best_of or self.n

    def with_(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed (and validated again)."""
        return replace(self, **changes)


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"structured_output is not JSON: {error}", param="structured_output") from error


def _require(condition: bool, message: str, param: str) -> None:
    if not condition:
        raise RequestError(message, param=param)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    bracket = "(" if open_low else "["
    _require(
        bool(ok) and (low < value if open_low else low <= value) and value <= high,  # type: ignore[operator]
        f"{name} must be a number in {bracket}{low:g}, {high:g}]",
        name,
    )


def _integer(name: str, value: object, low: int, high: int) -> None:
    _require(_is_int(value) and low <= value <= high, f"{name} must be an integer between {low} and {high}", name)  # type: ignore[operator]


def _check_counts(p: SamplingParams) -> None:
    _integer("n", p.n, 1, MAX_N)
    if p.best_of is not None:
        _integer("best_of", p.best_of, 1, MAX_N)
        _require(p.best_of >= p.n, f"best_of ({p.best_of}) must be at least n ({p.n})", "best_of")
    if p.max_tokens is not None:
        _integer("max_tokens", p.max_tokens, 0, 2**31 - 1)
    _integer("min_tokens", p.min_tokens, 0, 2**31 - 1)
    if p.max_tokens is not None:
        _require(
            p.min_tokens <= p.max_tokens,
            f"min_tokens ({p.min_tokens}) must not exceed max_tokens ({p.max_tokens})",
            "min_tokens",
        )
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(p, name) is not None:
            _integer(name, getattr(p, name), 0, 2**31 - 1)
    if p.pooling is not None:
        alone = p.max_tokens == 0 and p.num_sequences == 1 and p.beam is None and p.prompt_logprobs is None
        _require(alone, "pooling goes with max_tokens 0, one sequence and no logprobs", "pooling")
    if p.beam is not None:
        _require(p.n <= p.beam.width, f"n ({p.n}) must not exceed beam_width ({p.beam.width})", "n")


def _check_distribution(p: SamplingParams) -> None:
    _number("temperature", p.temperature, 0.0, 100.0)
    _number("top_p", p.top_p, 0.0, 1.0, open_low=True)
    _integer("top_k", p.top_k, -1, 2**63 - 1)
    _number("min_p", p.min_p, 0.0, 1.0)
    _number("presence_penalty", p.presence_penalty, -2.0, 2.0)
    _number("frequency_penalty", p.frequency_penalty, -2.0, 2.0)
    _number("repetition_penalty", p.repetition_penalty, 0.0, 10.0, open_low=True)
    if p.seed is not None:
        _integer("seed", p.seed, -(2**63), MAX_SEED)
    if p.logit_bias is not None:
        _require(isinstance(p.logit_bias, dict), "logit_bias must map token ids to numbers", "logit_bias")
        _require(
            len(p.logit_bias) <= MAX_LOGIT_BIAS,
            f"logit_bias may hold at most {MAX_LOGIT_BIAS} entries",
            "logit_bias",
        )
        for token_id, bias in p.logit_bias.items():
            _require(
                _is_int(token_id) and token_id >= 0,
                f"logit_bias key {token_id!r} is not a token id",
                "logit_bias",
            )
            _number("logit_bias", bias, -100.0, 100.0)


def _check_stopping(p: SamplingParams) -> None:
    _require(
        isinstance(p.stop, tuple) and all(isinstance(s, str) for s in p.stop),
        "stop must be a string or a list of strings",
        "stop",
    )
    _require(all(p.stop), "stop must not hold an empty string", "stop")
    _require(len(p.stop) <= MAX_STOP_STRINGS, f"stop may hold at most {MAX_STOP_STRINGS} strings", "stop")
    _require(
        all(len(s) <= MAX_STOP_LENGTH for s in p.stop),
        f"a stop string may have at most {MAX_STOP_LENGTH} characters",
        "stop",
    )


def _check_token_lists(p: SamplingParams) -> None:
    for name in ("stop_token_ids", "allowed_token_ids"):
        value = getattr(p, name)
        if value is None:
            continue
        _require(
            isinstance(value, tuple) and all(_is_int(t) and t >= 0 for t in value),
            f"{name} must be a list of token ids",
            name,
        )
        # A whole vocabulary may be allowed but one token; stop ids are few.
        limit = 2**20 if name == "allowed_token_ids" else MAX_TOKEN_ID_LIST
        _require(len(value) <= limit, f"{name} may hold at most {limit} ids", name)
    _require(
        p.allowed_token_ids is None or len(p.allowed_token_ids) > 0,
        "allowed_token_ids must not be empty",
        "allowed_token_ids",
    )
    _require(
        isinstance(p.bad_words, tuple) and all(isinstance(w, str) and w.strip() for w in p.bad_words),
        "bad_words must be a list of non-blank strings",
        "bad_words",
    )
    _require(len(p.bad_words) <= MAX_BAD_WORDS, f"bad_words may hold at most {MAX_BAD_WORDS} entries", "bad_words")
    _require(
        all(len(w) <= MAX_BAD_WORD_LENGTH for w in p.bad_words),
        f"a bad word may have at most {MAX_BAD_WORD_LENGTH} characters",
        "bad_words",
    )
