"""Requests that wait for a grammar, and sequences that follow one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import pytest

from pagedserve.errors import QueueFullError
from pagedserve.sampling_params import BeamParams, StructuredOutput
from pagedserve.scheduler.scheduler import Scheduler
from pagedserve.sequence import Request
from pagedserve.step import ModelRunnerOutput, SamplingInput
from tests.helpers.factories import Clock, make_request, make_scheduler

EOS = 2
OUTPUT = StructuredOutput.choice(["x"])


class Counting:
    """Admits any tokens, and is complete after `limit` of them; `broken_at` is where it cannot go on."""

    def __init__(self, limit: int, broken_at: int = -1):
        self.limit = limit
        self.broken_at = broken_at
        self.seen: list[int] = []
        self.error: str | None = None

    @property
    def is_complete(self) -> bool:
        return len(self.seen) >= self.limit

    def follow(self, token_ids: list[int], num_prompt_tokens: int) -> None:
        self.seen += token_ids[num_prompt_tokens + len(self.seen) :]
        if len(self.seen) == self.broken_at:
            self.error = "too complex"

    def fork(self) -> Self:
        twin = type(self)(self.limit, self.broken_at)
        twin.seen = self.seen.copy()
        return twin


class Masks:
    """A word a row, and what was asked for."""

    def __init__(self) -> None:
        self.lengths: list[list[int]] = []
        self.is_broken = False

    def __call__(self, constraints: Sequence[Counting]) -> bytes:
        if self.is_broken:
            raise RuntimeError("no masks today")
        self.lengths.append([len(constraint.seen) for constraint in constraints])
        return bytes(4 * len(constraints))


@pytest.fixture
def masks() -> Masks:
    return Masks()


@pytest.fixture
def scheduler(masks: Masks) -> Scheduler:
    return make_scheduler(fill_masks=masks)


def constrained(prompt: int | list[int] = 5, name: str = "c", **wishes: object) -> Request:
    return make_request(
        prompt, request_id=name, eos_token_ids=(EOS,), **{"max_tokens": 20, "structured_output": OUTPUT, **wishes}
    )


def run(scheduler: Scheduler, token: int = 7) -> tuple[SamplingInput, object]:
    """One step in which everybody says `token`: what it was given to sample, and what came of it."""
    output = scheduler.schedule()
    sampling = scheduler.sampling_input(output)
    ready = dict(zip(output.seq_ids, zip(output.num_computed, output.num_scheduled, strict=True), strict=True))
    owners = scheduler._groups.owners
    sampled = [s for s, (start, count) in ready.items() if start + count == len(owners[s][0].token_ids)]
    sampled += [child for child, _ in output.shared_logits]
    result = ModelRunnerOutput(
        step_id=output.step_id,
        seq_ids=sampled,
        sampled_token_ids=[[token] for _ in sampled],
        sampled_logprobs=[-0.5] * len(sampled),
    )
    outputs = scheduler.update(output, result)
    scheduler.check()
    return sampling, outputs


def test_a_request_keeps_its_place_while_its_grammar_is_made(scheduler: Scheduler) -> None:
    scheduler.add(constrained(name="first"))
    scheduler.add(make_request(5, request_id="second"))
    scheduler.check()
    assert scheduler.stats().num_waiting == 2
    run(scheduler)
    assert scheduler.stats().num_running == scheduler.stats().num_waiting == 1
    scheduler.constrain("first", Counting(3))
    run(scheduler)
    assert [group.request_id for group in scheduler._groups.running] == ["first", "second"]


def test_waiting_for_a_grammar_counts_as_waiting() -> None:
    scheduler = make_scheduler(max_queue_len=2)
    scheduler.add(constrained(name="a"))
    scheduler.add(constrained(name="b"))
    with pytest.raises(QueueFullError):
        scheduler.add(make_request(5, request_id="c"))


def test_it_can_be_aborted_withdrawn_or_run_out_of_time() -> None:
    clock = Clock()
    scheduler = make_scheduler(clock=clock)
    for name in ("aborted", "withdrawn"):
        scheduler.add(constrained(name=name))
    late = make_request(5, request_id="late", deadline=clock() + 1, structured_output=OUTPUT)
    scheduler.add(late)
    assert [f.request_id for f in scheduler.abort(["aborted"]).finished] == ["aborted"]
    assert scheduler.withdraw("withdrawn") and not scheduler.withdraw("withdrawn")
    clock.now += 2
    _, outputs = run(scheduler)
    assert [f.request_id for f in outputs.finished] == ["late"]  # type: ignore[attr-defined]
    for name in ("aborted", "withdrawn", "late", "unknown"):
        scheduler.constrain(name, Counting(1))
    scheduler.check()
    assert scheduler.num_unfinished == 0


def test_masks_are_for_rows_that_are_sampled_only(masks: Masks) -> None:
    scheduler = make_scheduler(fill_masks=masks, max_num_batched_tokens=4)
    scheduler.add(constrained(prompt=10))
    scheduler.constrain("c", Counting(3))
    for _ in range(2):
        sampling, _ = run(scheduler)
        assert sampling.masked_seq_ids == [] and sampling.token_masks == b""
    sampling, _ = run(scheduler)
    assert len(sampling.masked_seq_ids) == 1 and len(sampling.token_masks) == 4
    run(scheduler)
    assert masks.lengths == [[0], [1]]


def test_a_sequence_ends_with_its_grammar(scheduler: Scheduler) -> None:
    scheduler.add(constrained(max_tokens=3))
    scheduler.constrain("c", Counting(3))
    reasons = [run(scheduler)[1].finish_reasons for _ in range(3)]  # type: ignore[attr-defined]
    # At its last token it is complete as well as at its limit.
    assert reasons == [[None], [None], ["stop"]]
    assert scheduler.num_unfinished == 0


def test_an_end_token_ends_it_whatever_the_wishes(scheduler: Scheduler) -> None:
    scheduler.add(constrained(ignore_eos=True, min_tokens=5))
    scheduler.constrain("c", Counting(9))
    _, outputs = run(scheduler, token=EOS)
    assert outputs.finish_reasons == ["stop"] and outputs.stop_reasons == [None]  # type: ignore[attr-defined]


def test_samples_follow_their_own_tokens(scheduler: Scheduler, masks: Masks) -> None:
    scheduler.add(constrained(n=3))
    scheduler.constrain("c", Counting(2))
    sampling, _ = run(scheduler)
    assert len(sampling.masked_seq_ids) == 3
    constraints = {id(s.constraint) for s, _ in scheduler._groups.owners.values()}
    assert len(constraints) == 3
    _, outputs = run(scheduler)
    assert outputs.finish_reasons == ["stop"] * 3  # type: ignore[attr-defined]
    assert masks.lengths == [[0, 0, 0], [1, 1, 1]]


def test_beams_fork_what_was_said(scheduler: Scheduler, masks: Masks) -> None:
    scheduler.add(constrained(beam=BeamParams(width=2), n=2))
    scheduler.constrain("c", Counting(99))
    for step in range(3):
        output = scheduler.schedule()
        assert scheduler.sampling_input(output).masked_seq_ids == output.seq_ids
        best = {s: [(10 + step, -0.1), (20 + step, -0.2), (30 + step, -3.0)] for s in output.seq_ids}
        result = ModelRunnerOutput(
            step_id=output.step_id,
            seq_ids=output.seq_ids,
            sampled_token_ids=[[] for _ in output.seq_ids],
            sampled_logprobs=[0.0] * len(output.seq_ids),
            candidates=best,
        )
        scheduler.update(output, result)
        scheduler.check()
    scheduler.sampling_input(scheduler.schedule())
    for sequence, _ in scheduler._groups.owners.values():
        assert sequence.constraint.seen == sequence.output_token_ids
    assert masks.lengths == [[0], [1, 1], [2, 2], [3, 3]]


def test_a_grammar_that_cannot_go_on_ends_its_request_alone(scheduler: Scheduler) -> None:
    scheduler.add(constrained(name="bad"))
    scheduler.add(constrained(name="good"))
    scheduler.constrain("bad", Counting(9, broken_at=2))
    scheduler.constrain("good", Counting(4))
    run(scheduler)
    _, outputs = run(scheduler)
    [finished] = outputs.finished  # type: ignore[attr-defined]
    assert (finished.request_id, finished.error_kind, finished.error) == ("bad", "RequestError", "too complex")
    run(scheduler)
    _, outputs = run(scheduler)
    assert [f.error for f in outputs.finished] == [None]  # type: ignore[attr-defined]
    assert scheduler.num_unfinished == 0


def test_nothing_is_said_without_the_masks_that_it_needs(scheduler: Scheduler, masks: Masks) -> None:
    scheduler.add(constrained())
    scheduler.add(make_request(5, request_id="free"))
    scheduler.constrain("c", Counting(9))
    masks.is_broken = True
    _, outputs = run(scheduler)
    assert [f.request_id for f in outputs.finished] == ["c"]  # type: ignore[attr-defined]
    assert outputs.request_ids.count("c") == 1 and outputs.token_ids[outputs.request_ids.index("c")] == []  # type: ignore[attr-defined]
    assert "free" in outputs.request_ids  # type: ignore[attr-defined]
