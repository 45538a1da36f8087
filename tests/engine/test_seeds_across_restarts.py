"""Requests without a seed get one that no other start of the program would give them (C038)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import random, sys
random.seed(0)
from pagedserve import LLM, SamplingParams
with LLM(sys.argv[1], num_device_blocks=16, num_threads=1) as llm:
    seed = int(sys.argv[2]) if sys.argv[2:] else None
    params = SamplingParams(temperature=1.5, max_tokens=10, ignore_eos=True, seed=seed)
    print([output.outputs[0].token_ids for output in llm.generate(["x"] * 3, params, use_tqdm=False)])
"""


def run(model: Path, *seed: str) -> list[str]:
    """What two starts print."""
    command = [sys.executable, "-c", PROGRAM, str(model), *seed]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    return [process.communicate(timeout=120)[0] for process in runs]


def test_unseeded_answers_differ_between_two_starts(tiny_model: Path) -> None:  # C038
    first, second = run(tiny_model)
    assert first and second
    assert first != second
    assert len({str(ids) for ids in json.loads(first)}) == 3


def test_seeded_answers_do_not(tiny_model: Path) -> None:
    """Zero is a seed like any other."""
    first, second = run(tiny_model, "0")
    assert first == second
    assert len({str(ids) for ids in json.loads(first)}) == 1
