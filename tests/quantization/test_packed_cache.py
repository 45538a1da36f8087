"""Packed weights on disk: mapped when they fit, made again when they do not, never in the way."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pagedserve import packed_file, quantization
from pagedserve.kernels import native
from pagedserve.model_files import resolve
from pagedserve.models.loader import load_model, parse_config
from pagedserve.quantization import packed_cache
from pagedserve.quantization.packed import PackedMethod, PackedWeight, StackedWeight
from pagedserve.quantization.packed_cache import PackedCache
from tests.helpers.checkpoints import tiny_llama
from tests.helpers.paged_model import CPU, PagedModel

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built here")

ROOT = Path(__file__).parents[2]
SHAPES = {"qkv": (48, 64), "down": (33, 96), "head": (1000, 64)}
ROOMY = 1 << 30


@pytest.fixture(autouse=True)
def small_models_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(packed_cache, "MIN_BYTES", 0)
    monkeypatch.setenv("PAGEDSERVE_CACHE_DIR", str(tmp_path / "cache"))


def weights_of(weights_dtype: str = "int8") -> dict[str, PackedWeight | StackedWeight]:
    generator = torch.Generator().manual_seed(0)
    method = PackedMethod(weights_dtype)
    return {name: method.from_dense(torch.randn(*shape, generator=generator)) for name, shape in SHAPES.items()}


def filled(folder: Path, key: str = "key", limit: int = ROOMY) -> PackedCache:
    cache = PackedCache(folder, key, limit)
    for name, weight in weights_of().items():
        assert cache.get(name, SHAPES[name]) is None
        cache.add(name, weight)
    cache.save()
    return cache


def found(folder: Path, key: str = "key") -> dict[str, PackedWeight | StackedWeight | None]:
    cache = PackedCache(folder, key, ROOMY)
    return {name: cache.get(name, shape) for name, shape in SHAPES.items()}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("copied", [True, False])
def test_what_was_added_is_there_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    monkeypatch.setattr(packed_file, "MAX_COPIED_BYTES", ROOMY if copied else 0)
    filled(tmp_path)
    assert names_in(tmp_path) == ["key"]
    x = torch.randn(3, 64)
    for name, weight in found(tmp_path).items():
        wanted = weights_of()[name]
        assert weight.format == "int8" and (weight.out_features, weight.in_features) == SHAPES[name]
        assert torch.equal(weight.packed.data, wanted.packed.data)
        assert weight.packed.data.data_ptr() % (64 if copied else 4096) == 0
        assert weight.rounding_error == wanted.rounding_error
        if weight.in_features == 64:
            assert torch.equal(weight.matmul(x), wanted.matmul(x))


def test_a_file_that_was_begun_is_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path)
    packed_file.begin(tmp_path / "key")
    monkeypatch.setattr(packed_file, "_open", pytest.fail)
    for name, weight in found(tmp_path).items():
        assert torch.equal(weight.packed.data, weights_of()[name].packed.data)
    monkeypatch.undo()
    packed_file.begin(tmp_path / "key")
    packed_file.begin(tmp_path / "missing")
    packed_file.forget()
    with pytest.raises(FileNotFoundError):
        packed_file.read(tmp_path / "missing")
    assert all(found(tmp_path).values())


def test_a_file_that_is_cut_while_it_is_read_gives_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64)
    with path.open("rb") as file:
        content = packed_file._Copied(file, 20_000)
    assert content.piece(255, 2).tolist() == [255, 0]
    assert content.piece(0, 16_384).tolist() == list(range(256)) * 64
    for offset, num_bytes in ((16_000, 1000), (0, 20_001)):
        with pytest.raises(ValueError, match="cut short"):
            content.piece(offset, num_bytes)


def test_stacked_weights_of_several_formats(tmp_path: Path) -> None:
    parts = [torch.randn(16, 64), torch.randn(5, 64).bfloat16()]
    weight = PackedMethod("auto").from_dense(parts)
    assert isinstance(weight, StackedWeight)
    cache = PackedCache(tmp_path, "key", ROOMY)
    assert cache.get("both", (21, 64)) is None
    cache.add("both", weight)
    cache.save()
    again = PackedCache(tmp_path, "key", ROOMY).get("both", (21, 64))
    assert [part.format for part in again.parts] == ["float32", "bfloat16"]
    assert torch.equal(again.dequantize(), weight.dequantize())


def test_a_matrix_of_another_shape_is_not_taken(tmp_path: Path) -> None:
    filled(tmp_path)
    assert PackedCache(tmp_path, "key", ROOMY).get("qkv", (64, 48)) is None


def test_what_was_missing_is_written_beside_the_rest(tmp_path: Path) -> None:
    filled(tmp_path)
    cache = PackedCache(tmp_path, "key", ROOMY)
    assert cache.get("qkv", SHAPES["qkv"]) is not None and cache.get("new", (16, 32)) is None
    cache.add("new", PackedMethod("bfloat16").from_dense(torch.ones(16, 32)))
    cache.save()
    again = PackedCache(tmp_path, "key", ROOMY)
    assert again.get("new", (16, 32)).format == "bfloat16"
    assert torch.equal(again.get("qkv", SHAPES["qkv"]).packed.data, weights_of()["qkv"].packed.data)


def damage(path: Path, at: int, bits: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= bits
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["first byte", "index", "length", "first page", "last page", "cut", "empty", "text"])
def test_a_damaged_file_is_noticed_and_made_again(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    filled(tmp_path)
    path = tmp_path / "key"
    size = path.stat().st_size
    match how:
        case "first byte":
            damage(path, 0)
        case "index":
            damage(path, 60)
        case "length":
            damage(path, 15, 0x7F)
        case "first page":
            damage(path, 4096 + 77)
        case "last page":
            damage(path, size - 4096 + 5, 128)
        case "cut":
            os.truncate(path, size - 4096)
        case "empty":
            path.write_bytes(b"")
        case "text":
            path.write_text("no such thing " * 1000)
    cache = PackedCache(tmp_path, "key", ROOMY)
    for name, weight in weights_of().items():
        if cache.get(name, SHAPES[name]) is None:
            cache.add(name, weight)
    cache.save()
    assert "is damaged" in caplog.text
    for name, weight in found(tmp_path).items():
        assert torch.equal(weight.packed.data, weights_of()[name].packed.data)


def test_every_single_bit_counts(tmp_path: Path) -> None:
    """Of codes, scales and whatever lies beyond the last whole MiB."""
    weight = PackedMethod("float32").from_dense(torch.randn(600, 512))
    data = weight.packed.data.numpy()
    assert len(data) > 1 << 20 and len(data) % (1 << 20)
    before = packed_cache._checksum(data)
    for at in (0, 1, 4095, (1 << 20) - 1, 1 << 20, len(data) - 1):
        data[at] ^= 64
        assert packed_cache._checksum(data) != before, at
        data[at] ^= 64
    assert packed_cache._checksum(data) == before


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    for age, key in enumerate(("a", "b", "c")):
        filled(tmp_path, key)
        os.utime(tmp_path / key, (time.time() - 100 + age, time.time() - 100 + age))
    size = (tmp_path / "a").stat().st_size
    found(tmp_path, "a")  # now b is the one that was not used for longest
    filled(tmp_path, "d", limit=3 * size)
    assert names_in(tmp_path) == ["a", "c", "d"]
    filled(tmp_path, "e", limit=size // 2)  # alone too large: nothing is thrown away for it
    assert names_in(tmp_path) == ["a", "c", "d"]


def test_what_a_killed_start_left_is_removed_once_it_is_old(tmp_path: Path) -> None:
    for name, age in ((".old.1.2", 7200), (".new.1.2", 60)):
        (tmp_path / name).write_bytes(b"x" * 100)
        os.utime(tmp_path / name, (time.time() - age, time.time() - age))
    filled(tmp_path)
    assert names_in(tmp_path) == [".new.1.2", "key"]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = filled(tmp_path / "file" / "packed")
    assert not cache.path.exists()


def test_two_starts_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from pathlib import Path\n"
        "from pagedserve.quantization import packed_cache as p\n"
        "from pagedserve.quantization.packed import PackedMethod\n"
        "p.MIN_BYTES = 0; torch.manual_seed(0)\n"
        "w = PackedMethod('int8').from_dense(torch.randn(512, 1024))\n"
        "for _ in range(20):\n"
        "    c = p.PackedCache(Path(sys.argv[1]), 'key', 1 << 30); old = c.get('w', (512, 1024))\n"
        "    assert old is None or torch.equal(old.packed.data, w.packed.data)\n"
        "    c._is_complete = False; c.add('w', w); c.save()\n"
    )
    starts = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT) for _ in range(2)]
    assert [start.wait(timeout=120) for start in starts] == [0, 0]
    assert names_in(tmp_path) == ["key"]


# ---- through the loader -------------------------------------------------------------------------------------------


def load(folder: Path, weights_dtype: str = "auto"):
    files = resolve(str(folder))
    config = parse_config(files)
    return load_model(
        files,
        config,
        attention=PagedModel(folder).backend,
        quant=quantization.select(weights_dtype, CPU),
        dtype=torch.float32,
        device=CPU,
        use_packed_cache=True,
    )


@pytest.mark.parametrize("tied", [False, True])
def test_a_second_start_packs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    folder = tiny_llama(tmp_path / "model", tokenizer=False, tie_word_embeddings=tied)
    first = load(folder)
    assert len(names_in(tmp_path / "cache" / "packed")) == 1

    def packs(*args: object) -> None:
        raise AssertionError("something was packed again")

    monkeypatch.setattr(native.PackedMatrix, "pack", packs)
    second = load(folder)
    assert second.weights_bytes == first.weights_bytes
    ids = torch.tensor([3, 5, 8])
    hidden = torch.randn(3, 64)
    assert torch.equal(second.compute_logits(hidden), first.compute_logits(hidden))
    assert torch.equal(second.embed_tokens(ids), first.embed_tokens(ids))


def test_other_weights_and_other_formats_have_files_of_their_own(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", tokenizer=False)
    packed = tmp_path / "cache" / "packed"
    load(folder)
    load(folder, "int8")
    assert len(names_in(packed)) == 2
    path = folder / "model.safetensors"
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime + 5))
    load(folder)
    assert len(names_in(packed)) == 3


def test_zero_turns_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDSERVE_PACKED_CACHE", "0")
    load(tiny_llama(tmp_path / "model", tokenizer=False))
    assert not (tmp_path / "cache").exists()


def test_small_models_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "MIN_BYTES", 16 << 20)
    load(tiny_llama(tmp_path / "model", tokenizer=False))
    assert not (tmp_path / "cache").exists()


def test_the_error_of_quantising_is_reported_by_every_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_llama(tmp_path / "model", tokenizer=False)
    caplog.set_level("INFO", logger="pagedserve")
    told = []
    for weights_dtype in ("auto", "int8", "int8", "int4"):
        caplog.clear()
        load(folder, weights_dtype)
        told.append([record.message for record in caplog.records if "relative RMS error" in record.message])
    assert told[0] == []
    assert told[1] == told[2] and len(told[1]) == len(told[3]) == 1
    errors = [float(lines[0].split()[-2]) for lines in (told[1], told[3])]
    assert 0.1 < errors[0] < 1.0 < 3.0 < errors[1] < 12.0
