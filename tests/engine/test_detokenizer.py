"""Exact incremental text and stop strings (C001-C009, C011, C012)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from pagedserve.engine.detokenizer import IncrementalDetokenizer, StopChecker, TextStream
from pagedserve.engine.tokenizer import Tokenizer
from pagedserve.model_files import resolve
from pagedserve.sampling_params import SamplingParams
from tests.helpers.byte_tokenizer import BOS_ID, EOS_ID, byte_ids
from tests.helpers.demo_model import demo_model
from tests.helpers.tokenizers import byte_backend_with_added_tokens, spm_backend

PLAIN = SamplingParams()
RAW = SamplingParams(skip_special_tokens=False)


def _without_decoder() -> Tokenizer:
    content = json.loads(byte_backend_with_added_tokens().to_str())
    content["decoder"] = None
    return Tokenizer(Backend.from_str(json.dumps(content)))


BYTE_LEVEL = Tokenizer(byte_backend_with_added_tokens())
SPM = Tokenizer(spm_backend())
SPM_NO_PREFIX = Tokenizer(spm_backend(add_prefix_space=False))
BARE = _without_decoder()
TOKENIZERS = {"byte_level": BYTE_LEVEL, "spm": SPM, "spm_no_prefix": SPM_NO_PREFIX, "bare": BARE}


@pytest.fixture(scope="module")
def demo_tokenizer(tmp_path_factory):
    return Tokenizer.load(resolve(str(demo_model())), cache_dir=tmp_path_factory.mktemp("cache"))


def spm_ids(*pieces):
    ids = [SPM.token_to_id(piece) for piece in pieces]
    assert None not in ids
    return ids


def stream(tokenizer, ids, params=PLAIN, prompt=()):
    """Deltas, one a token, and the flush."""
    detokenizer = IncrementalDetokenizer(tokenizer, params, prompt)
    return [*(detokenizer.append([i]) for i in ids), detokenizer.finish()]


def chunks_of(items, lengths):
    """Cut a list into pieces of these lengths (some empty), and what is left."""
    pieces = []
    for length in lengths:
        pieces.append(items[:length])
        items = items[length:]
    return [*pieces, items]


LENGTHS = st.lists(st.integers(0, 4), max_size=8)
IDS = st.lists(st.integers(0, 600), max_size=24)


# -- detokenization -------------------------------------------------------------------------------------------------


def test_c001_characters_split_over_tokens():
    text = "a🦜é汉👩‍👩‍👧‍👦🇺🇳 z"
    deltas = stream(BYTE_LEVEL, byte_ids(text))
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)
    for delta in deltas:
        delta.encode("utf-8")


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 4])
def test_c002_output_cut_inside_a_character(num_bytes):
    ids = byte_ids("ok🦜")[: 2 + num_bytes]
    text = "".join(stream(BYTE_LEVEL, ids))
    assert text == BYTE_LEVEL.decode(ids) == BYTE_LEVEL.backend.decode(ids)
    assert text.startswith("ok")


def test_c003_invalid_bytes_do_not_hold_up_what_follows():
    raw = b"A\xffB\xc0\x80C\xed\xa0\x80D\x80\x80\x80\x80E"
    ids = [BYTE_LEVEL.backend.token_to_id(BYTE_LEVEL.id_to_token(4 + byte)) for byte in raw]
    deltas = stream(BYTE_LEVEL, ids)
    assert "".join(deltas) == raw.decode("utf-8", "replace")
    at = {letter: next(i for i, delta in enumerate(deltas) if letter in delta) for letter in "ABCDE"}
    assert all(at[letter] == raw.index(letter.encode()) for letter in "ABCDE"), "each letter comes with its own token"


@pytest.mark.parametrize(
    "pieces",
    [
        ("▁hello", "▁▁", "wo", "rld", "▁!"),
        ("hel", "lo"),
        ("▁",),
        ("▁", "▁", "he"),
        ("▁▁", "hel"),
        ("<0xE6>", "<0xB1>", "<0x89>"),
    ],
)
@pytest.mark.parametrize("prompt", ["Say:", "", " ", "the "])
def test_c004_space_between_prompt_and_completion(pieces, prompt):
    prompt_ids = [1, *SPM.encode(prompt, add_special_tokens=False)]
    ids = spm_ids(*pieces)
    oracle = SPM.backend.decode
    expected = oracle(prompt_ids + ids)[len(oracle(prompt_ids)) :]
    assert "".join(stream(SPM, ids, prompt=prompt_ids)) == expected


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("spaces", [True, False])
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BARE], ids=["byte_level", "bare"])
def test_c005_special_tokens(tokenizer, skip, spaces):
    names = ["<SP1>", "<SP2>", "x", "<SP1>", "<note>", "</s>"]
    ids = [tokenizer.token_to_id(name) for name in names]
    params = SamplingParams(skip_special_tokens=skip, spaces_between_special_tokens=spaces)
    text = "".join(stream(tokenizer, ids, params))
    assert text == tokenizer.decode(ids, skip_special_tokens=skip, spaces_between_special_tokens=spaces)
    assert "<note>" in text
    if tokenizer is BYTE_LEVEL:
        assert text == ("x<note>" if skip else "<SP1><SP2>x<SP1><note></s>")


def test_special_tokens_that_a_parser_reads_are_shown():
    """C005: only those that were asked for, the others stay hidden."""
    ids = [BYTE_LEVEL.token_to_id(name) for name in ["<SP1>", "x", "<SP2>", "</s>"]]
    shown = (BYTE_LEVEL.token_to_id("<SP2>"),)
    assert "".join(stream(BYTE_LEVEL, ids, SamplingParams(shown_special_ids=shown))) == "x<SP2>"
    params = SamplingParams(shown_special_ids=shown, skip_special_tokens=False)
    assert "".join(stream(BYTE_LEVEL, ids, params)) == "<SP1>x<SP2></s>"


@pytest.mark.parametrize("name", TOKENIZERS)
@given(ids=IDS, lengths=LENGTHS, skip=st.booleans(), spaces=st.booleans())
@settings(deadline=None, max_examples=100)
def test_any_split_gives_the_whole(name, ids, lengths, skip, spaces):
    tokenizer = TOKENIZERS[name]
    params = SamplingParams(skip_special_tokens=skip, spaces_between_special_tokens=spaces)
    detokenizer = IncrementalDetokenizer(tokenizer, params)
    text = "".join(detokenizer.append(chunk) for chunk in chunks_of(ids, lengths)) + detokenizer.finish()
    assert text == tokenizer.decode(ids, skip_special_tokens=skip, spaces_between_special_tokens=spaces)
    assert len(detokenizer.offsets) == len(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(prompt=IDS, ids=IDS, skip=st.booleans())
@settings(deadline=None, max_examples=100)
def test_a_completion_continues_its_prompt(name, prompt, ids, skip):
    """prompt + completion == text of both, whenever the prompt does not end inside a character."""
    tokenizer = TOKENIZERS[name]
    params = SamplingParams(skip_special_tokens=skip)
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    completion = "".join(stream(tokenizer, ids, params, prompt))
    if not before.endswith("\ufffd"):
        assert before + completion == tokenizer.decode(prompt + ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    ("num_prompt_bytes", "completion", "expected"),
    [
        (1, "🦜!".encode()[1:], "🦜!"),
        (3, "🦜!".encode()[3:], "🦜!"),
        (2, b"x", "x"),
        (2, b"", ""),
        (3, "é".encode(), "é"),
    ],
)
def test_a_prompt_that_ends_inside_a_character(num_prompt_bytes, completion, expected):
    """The completion shows the character if it completes it, and nothing of the prompt otherwise."""
    prompt = [BOS_ID, *byte_ids("ab"), *(4 + b for b in "🦜".encode()[:num_prompt_bytes])]
    deltas = stream(BYTE_LEVEL, [4 + byte for byte in completion], prompt=prompt)
    assert "".join(deltas) == expected


def test_offsets_are_where_tokens_begin():
    ids = [*byte_ids("aé"), EOS_ID, *byte_ids("🦜b")]
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, PLAIN)
    text = detokenizer.append(ids) + detokenizer.finish()
    assert text == "aé🦜b"
    assert detokenizer.offsets == [0, 1, 1, 2, 2, 2, 2, 2, 3]


def test_offsets_after_a_stripped_space():
    detokenizer = IncrementalDetokenizer(SPM, PLAIN)
    assert detokenizer.append(spm_ids("▁hello", "▁world")) == "hello world"
    assert detokenizer.offsets == [0, 5]


def test_every_token_of_the_demo_vocabulary_after_every_kind_of_neighbour(demo_tokenizer):
    """Each of the 49,152 tokens: after text, after half a character, before the other half, twice."""
    tokenizer = demo_tokenizer
    half = [tokenizer.encode("汉", add_special_tokens=False)[0]]
    assert b"\xe6" in tokenizer.id_to_bytes(half[0])
    letter = tokenizer.encode("a", add_special_tokens=False)
    for token_id in range(tokenizer.vocab_size):
        ids = [*letter, token_id, *half, token_id, token_id, *letter]
        text = "".join(stream(tokenizer, ids, RAW))
        assert text == tokenizer.backend.decode(ids, skip_special_tokens=False), token_id


def test_every_token_of_the_sentencepiece_vocabulary():
    for token_id in range(SPM.vocab_size):
        for prefix in ([], spm_ids("▁hello"), spm_ids("▁")):
            ids = [*prefix, token_id, *spm_ids("▁world")]
            expected = SPM.backend.decode(ids, skip_special_tokens=False)
            text = "".join(stream(SPM, ids, RAW))
            assert text == expected, token_id


# -- stop strings ---------------------------------------------------------------------------------------------------


def run_checker(params, pieces):
    """Delivered texts, and how many pieces were taken before the stop."""
    checker = StopChecker(params)
    delivered = []
    for i, piece in enumerate(pieces, start=1):
        delivered.append(checker.append(piece, i))
        if checker.matched is not None:
            return delivered, i, checker.matched
    delivered.append(checker.finish())
    return delivered, len(pieces), None


PIECES = ["Total", ": 4", "2\nRe", "sul", "t: x"]


@pytest.mark.parametrize(("stop", "expected", "taken"), [("\nResult:", "Total: 42", 5), ("2\nR", "Total: 4", 3)])
def test_c006_stop_string_over_several_tokens(stop, expected, taken):
    delivered, num_pieces, matched = run_checker(SamplingParams(stop=(stop,)), PIECES)
    assert ("".join(delivered), num_pieces, matched) == (expected, taken, stop)


@pytest.mark.parametrize(("include", "expected"), [(True, "foo END"), (False, "foo ")])
def test_c007_include_stop_string(include, expected):
    params = SamplingParams(stop=("END",), include_stop_str_in_output=include)
    delivered, num_pieces, matched = run_checker(params, ["foo", " END bar", "baz"])
    assert ("".join(delivered), num_pieces, matched) == (expected, 2, "END")


def test_c008_held_back_text_is_released():
    delivered, _, matched = run_checker(SamplingParams(stop=("STOP!!!!!!!!",)), ["end with ", "ST", "O"])
    assert delivered == ["end with ", "", "", "STO"]
    assert matched is None


def test_c008_only_a_beginning_of_a_stop_string_is_held():
    delivered, _, _ = run_checker(SamplingParams(stop=("STOP",)), ["xST", "OSTO", "Q", "ok"])
    assert delivered == ["x", "STO", "STOQ", "ok", ""]


def test_c009_stop_in_the_first_token():
    assert run_checker(SamplingParams(stop=("\n",)), ["\n", "more"]) == ([""], 1, "\n")


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_c011_an_invisible_stop_token_takes_no_text_with_it(skip, include):
    params = SamplingParams(skip_special_tokens=skip, include_stop_str_in_output=include)
    text = TextStream(BYTE_LEVEL, params)
    ids = [*BYTE_LEVEL.encode("hello world", add_special_tokens=False)]
    # The engine appends the stop token's text only where it is to be seen.
    ids += [BYTE_LEVEL.token_to_id("<SP1>")] if include else []
    whole = text.append(ids).text + text.finish().text
    assert whole == "hello world" + ("<SP1>" if include and not skip else "")


def test_c012_min_tokens_make_an_early_stop_string_ordinary_text():
    pieces = ["a", "END", "b", "c", "d", "e", "f", "END", "g"]
    delivered, num_pieces, matched = run_checker(SamplingParams(stop=("END",), min_tokens=5), pieces)
    assert ("".join(delivered), num_pieces, matched) == ("aENDbcdef", 8, "END")


def test_min_tokens_end_exactly_at_the_stop():
    params = SamplingParams(stop=("END",), min_tokens=2)
    assert run_checker(params, ["a", "END", "b"]) == (["a", ""], 2, "END")


def test_the_stop_that_is_complete_first_wins_and_then_the_longest():
    assert run_checker(SamplingParams(stop=("abcd", "c")), ["ab", "cd"])[2] == "c"
    delivered, _, matched = run_checker(SamplingParams(stop=("lo", "hello")), ["hel", "lo"])
    assert (delivered, matched) == (["", ""], "hello")


def reference_stop(text, stops, include):
    """By definition: the smallest end of any occurrence; of those, the longest stop."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end if include else end - len(stop)], stop


@given(
    st.lists(st.text("ab", min_size=0, max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    st.booleans(),
)
@settings(deadline=None, max_examples=250)
def test_any_split_finds_what_the_whole_text_has(pieces, stops, include):  # C006
    params = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include)
    delivered, num_pieces, matched = run_checker(params, pieces)
    expected, stop = reference_stop("".join(pieces), stops, include)
    assert ("".join(delivered), matched) == (expected, stop)
    if stop is not None:
        assert reference_stop("".join(pieces[: num_pieces - 1]), stops, include)[1] is None, "found as early as can be"
    # What is withheld is always a proper beginning of a stop string, and the shortest that must be.
    sent = ""
    for i, text in enumerate(delivered[:-1], start=1):
        sent += text
        held = "".join(pieces[:i])[len(sent) :]
        assert any(s.startswith(held) and len(held) < len(s) for s in stops)
        longest = max((n for s in stops for n in range(len(s)) if "".join(pieces[:i]).endswith(s[:n])), default=0)
        assert len(held) == longest


@given(
    text=st.text("abé🦜 ", max_size=16),
    stops=st.lists(st.text("abé🦜 ", min_size=1, max_size=3), max_size=3),
    lengths=LENGTHS,
)
@settings(deadline=None, max_examples=150)
def test_text_stream_equals_text_cut_at_the_stop(text, stops, lengths):
    ids = byte_ids(text)
    output = TextStream(BYTE_LEVEL, SamplingParams(stop=tuple(stops)))
    collected, used, found = "", 0, None
    for chunk in chunks_of(ids, lengths):
        update = output.append(chunk)
        collected += update.text
        used += update.num_tokens
        if (found := update.stop) is not None:
            break
    else:
        collected += output.finish().text
    expected, stop = reference_stop(text, stops, include=False)
    assert (collected, found) == (expected, stop)
    if stop is None:
        assert used == len(ids)
    else:
        end = text.encode()[: len((expected + stop).encode())]
        assert used == len(end), "the stop is complete with this token and not before"
    assert output.finish().text == ""


def test_many_long_stops_that_nearly_match_do_not_slow_down_the_stream():
    """Work is linear in the text: the number of steps, not the time, is what is counted here (C010)."""
    stops = tuple("a" * n + "b" for n in range(4080, 4096))
    checker = StopChecker(SamplingParams(stop=stops))
    steps = 0
    original = checker._advance

    def counted(char):
        nonlocal steps
        steps += 1
        return original(char)

    checker._advance = counted
    for i in range(2000):
        checker.append("aa", i)
    assert steps == 4000
    assert len(checker.finish()) == 4000
