"""The table of fault cases in `tests/README.md`: complete, and every test that it names exists and says so."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
NUM_CASES = 121


def rows() -> list[tuple[list[str], list[tuple[str, str]]]]:
    """Cases and the tests named for them, (file, function), a row of either table each."""
    found = []
    for line in (TESTS / "README.md").read_text(encoding="utf-8").splitlines():
        if match := re.match(r"\| C(\d{3})(?:-C(\d{3}))? \| (.+) \|$", line):
            first, last = int(match[1]), int(match[2] or match[1])
            tests = re.findall(r"`([\w/]+\.py)::(\w+)`", match[3])
            found.append(([f"C{number:03}" for number in range(first, last + 1)], tests))
    return found


@functools.cache
def functions(file: str) -> dict[str, str]:
    """The source of each function of a test file."""
    source = (TESTS / file).read_text(encoding="utf-8")
    lines = source.splitlines()
    return {
        node.name: "\n".join(lines[node.lineno - 1 : node.end_lineno])
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_every_case_is_in_the_tables_once() -> None:
    cases = [case for numbers, _ in rows() for case in numbers]
    assert sorted(cases) == [f"C{number:03}" for number in range(1, NUM_CASES + 1)]


def test_every_test_that_is_named_exists_and_carries_the_number() -> None:
    missing, unlabelled = [], []
    for cases, tests in rows():
        for file, name in tests:
            source = functions(file).get(name) if (TESTS / file).exists() else None
            if source is None:
                missing.append(f"{file}::{name}")
            elif not all(case.lower() in source.lower() for case in cases):
                unlabelled.append(f"{file}::{name} {cases}")
    assert missing == []
    assert unlabelled == []


def test_files_that_reasons_point_to_exist() -> None:
    text = (TESTS / "README.md").read_text(encoding="utf-8")
    assert [file for file in re.findall(r"`([\w/]+\.py)`", text) if not (TESTS / file).exists()] == []
