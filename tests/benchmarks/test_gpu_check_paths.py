"""What the GPU check does only on a card, on a torch.cuda that pretends: that its code runs, not what it finds."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import answers, attention, clock, compiling, engine, environment, ops, report
from benchmarks.gpu.check import Check, read


class PretendedCard(Check):
    """The CPU, taken for a card."""

    on_gpu = True


class Event:
    def __init__(self, enable_timing: bool = False):
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, other: Event) -> float:
        return (other._at - self._at) * 1e3


def refuse(graph: Any) -> Any:
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PretendedCard:
    for name, value in {
        "Event": Event,
        "CUDAGraph": type("CUDAGraph", (), {"replay": lambda graph: None}),
        "graph": refuse,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "get_device_capability": lambda device=None: (9, 0),
        "mem_get_info": lambda device=None: (70 << 30, 80 << 30),
        "get_device_properties": lambda index: SimpleNamespace(name="X", major=9, minor=0, multi_processor_count=132),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(engine, "_replays", cache(engine._Replays))
    return PretendedCard("a", tmp_path / "rows.jsonl", device="cpu", scale="tiny", seconds=300, out=tmp_path)


def checked(check: Check) -> dict[str, Any]:
    """Values by name, nothing having gone wrong."""
    rows = read(check._results)
    assert report.failures(rows) == []
    return {row["name"]: row for row in rows if row["kind"] == "value"}


def test_ceilings_and_kernels(card: PretendedCard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "available", lambda: ["reference", "triton"])  # the second is skipped, with a reason
    environment.run(card)
    attention.decode(card)
    attention.prefill(card)
    for phase in (ops.fused, ops.swap, ops.launches):
        phase(card)
    found = checked(card)
    assert found["device"]["value"] == "X"
    assert found["node of a graph"]["value"] > 0
    skipped = [row["note"] for row in read(card._results) if row["kind"] == "skipped"]
    assert any(note.startswith("triton: ") for note in skipped)
    name = next(name for name in found if name.startswith("decode") and "sdpa" not in name)
    assert found[name]["goal"] is None


def test_sampling(card: PretendedCard) -> None:
    ops.sampling(card)
    assert len(checked(card)) == 7


def test_the_engine_and_its_idle_time(card: PretendedCard, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [engine._Span("kernel", 100.0 * i, 100.0 * i + 60.0) for i in range(24)]
    monkeypatch.setattr(engine, "_kernels", lambda decoding, count: [decoding.step() for _ in range(2)] and spans)
    engine.llama(card, 0)
    found = checked(card)
    assert found["Llama-3-8B: decode, 1"]["goal"] == 240.0
    assert found["Llama-3-8B: prompts"]["goal"] == engine.PREFILL_GOAL
    idle = found["Llama-3-8B: idle between steps, 1"]
    assert (idle["value"], idle["goal"], idle["met"]) == (40.0, 50.0, True)
    assert found["Llama-3-8B: busy, 1"]["value"] == 120.0
    assert "120 us kernel" in found["Llama-3-8B: kernels, 1"]["value"]


def test_an_engine_without_a_profiler_or_graphs(card: PretendedCard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_kernels", lambda decoding, count: [])
    engine.opt(card, 1)  # a second try: without graphs
    engine.host(card, 0)
    found = checked(card)
    assert "OPT-13B: idle between steps, 2" not in found
    assert found["host time a step, 3"]["value"] > 0


def test_gaps_between_graphs_are_seen(card: PretendedCard) -> None:
    graph = torch.cuda.CUDAGraph()
    engine._replays()

    def step() -> None:
        graph.replay()
        time.sleep(0.002)

    gap = engine._between_graphs(SimpleNamespace(step=step), 4)
    assert gap is not None
    assert 1_500 < gap < 200_000
    assert engine._between_graphs(SimpleNamespace(step=lambda: None), 4) is None
    graph.replay()
    assert engine._replays().events is None


def test_spans_that_overlap_leave_no_gap() -> None:
    spans = [engine._Span("a", 0.0, 10.0), engine._Span("b", 5.0, 8.0), engine._Span("c", 9.0, 20.0)]
    assert list(engine._gaps([*spans, engine._Span("d", 25.0, 30.0)])) == [5.0]


def test_answers(card: PretendedCard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_NEAR", {torch.float32: 0.0})
    monkeypatch.setattr(answers, "available", lambda: ["reference", "cpu"])
    answers._against_transformers(card, torch.float32)
    found = checked(card)
    assert found["greedy as transformers, float32"]["met"]
    assert found["greedy on reference, float32"]["met"]


def test_what_is_compiled_on_a_card(card: PretendedCard, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from pagedserve.kernels.triton import variants

    compiled = SimpleNamespace(_init_handles=lambda: None, n_regs=40, n_spills=0, metadata=SimpleNamespace(shared=64))
    monkeypatch.setattr(variants.Variant, "warm_up", lambda self: compiled)
    compiling.on_card(card, 0, 40)
    found = checked(card)
    assert found
    assert all("40 registers" in row["note"] for row in found.values())


def test_a_call_is_timed_in_turn_with_others(card: PretendedCard) -> None:
    done: list[int] = []
    took = clock.seconds([lambda: done.append(1), lambda: time.sleep(0.01)], torch.device("cuda"), budget=0.01)
    assert 0.004 < took < 0.1
    assert clock.host_seconds(lambda: time.sleep(0.001), torch.device("cpu"), 3) > 0.0009
