"""The map and the tree agree."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAP = ROOT / "pagedserve" / "README.md"


def test_the_map_names_every_room_and_every_vocabulary_module() -> None:
    text = MAP.read_text(encoding="utf-8")
    package = ROOT / "pagedserve"
    names = [p.name for p in package.iterdir() if p.is_dir() and list(p.glob("*.py"))]
    names += [p.name for p in package.glob("*.py") if p.name != "__init__.py"]
    missing = [name for name in names if f"`{name}" not in text]
    assert missing == []


def test_every_file_the_documents_link_to_exists() -> None:
    documents = [p for p in ROOT.glob("*.md")] + [MAP, ROOT / "pagedserve" / "DECISIONS.md"]
    documents += [ROOT / d / "README.md" for d in ("csrc", "tests", "benchmarks")]
    broken = []
    for document in documents:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
            if not (document.parent / target).exists():
                broken.append(f"{document.relative_to(ROOT)} -> {target}")
    assert broken == []
