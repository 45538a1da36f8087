"""GGUF files: every type, row order, and broken files (C091)."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from pagedserve.errors import ModelLoadError
from pagedserve.gguf_file import QUANT_TYPES, GGUFFile
from tests.helpers.checkpoints import llama_config, random_tensors
from tests.helpers.gguf_files import QUANTIZABLE, byte_level_vocabulary, random_blocks, write_llama_gguf
from tests.helpers.tokenizers import byte_level_backend

TYPE_NAMES = [quant.name for quant in QUANT_TYPES.values()]


@pytest.fixture(scope="module")
def config():
    return {**llama_config(head_dim=16), "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def tensors(config):
    return random_tensors(config)


def small_file(tmp_path, config, tensors, **options):
    return write_llama_gguf(tmp_path / "tiny.gguf", config, tensors, **options)


def test_float32_tensors_come_back_in_hugging_face_order(tmp_path, config, tensors):
    file = GGUFFile(small_file(tmp_path, config, tensors))
    assert sorted(file.tensor_names()) == sorted(tensors)
    for name, expected in tensors.items():
        assert file.shape(name) == expected.shape
        np.testing.assert_array_equal(file.dequantize(name), expected)


def test_biases_of_interleaved_rows_come_back_too(tmp_path):
    config = llama_config(attention_bias=True, mlp_bias=True)
    tensors = random_tensors(config)
    file = GGUFFile(small_file(tmp_path, config, tensors))
    assert file.config()["attention_bias"] and file.config()["mlp_bias"]
    for name, expected in tensors.items():
        np.testing.assert_array_equal(file.dequantize(name), expected)


@pytest.mark.parametrize("quant", QUANTIZABLE)
def test_quantized_rows_are_the_same_rows(tmp_path, config, tensors, quant):
    """Permuting packed rows and dequantising them commute."""
    file = GGUFFile(small_file(tmp_path, config, tensors, quant=quant))
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"):
        kind, packed = file.quantized(name)
        assert kind.name == quant
        assert packed.dtype == np.uint8
        assert packed.shape == (tensors[name].shape[0], tensors[name].shape[1] // kind.block_len * kind.block_bytes)
        expected = file.dequantize(name)
        ggml = GGMLQuantizationType[quant]
        typed = packed.view({"F32": np.float32, "F16": np.float16}.get(quant, np.uint8))
        np.testing.assert_array_equal(dequantize(typed, ggml), expected)
        # A row's own error bounds how far it may be from the original; a swapped row would be far off.
        assert np.abs(expected - tensors[name]).max() < 0.2 * np.abs(tensors[name]).max()
        _, raw = file.raw(name)
        np.testing.assert_array_equal(raw[file.row_permutation(name)], packed)


@pytest.mark.parametrize("quant", TYPE_NAMES)
def test_every_type_dequantizes_as_the_gguf_package_does(tmp_path, config, quant):  # C091
    path = tmp_path / "one.gguf"
    writer = GGUFWriter(path, "llama")
    rows = random_blocks(quant, 6, 512)
    typed = rows.view({"F32": np.float32, "F16": np.float16}.get(quant, np.uint8))
    writer.add_tensor("token_embd.weight", typed, raw_dtype=GGMLQuantizationType[quant])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    assert file.shape("model.embed_tokens.weight") == (6, 512)
    assert file.quant_type("model.embed_tokens.weight").name == quant
    tensor = GGUFReader(path).tensors[0]
    values = file.dequantize("model.embed_tokens.weight")
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, dequantize(tensor.data, tensor.tensor_type))
    assert np.isfinite(values).all() and np.abs(values).max() > 0


def test_other_types_are_refused_by_name(tmp_path):
    path = tmp_path / "iq4.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((2, 136), np.uint8), raw_dtype=GGMLQuantizationType.IQ4_XS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"token_embd\.weight has type IQ4_XS.*known: F32, F16.*Q6_K"):
        GGUFFile(path)


def test_metadata_equals_what_the_gguf_package_reads(tmp_path, config, tensors):
    def extra(writer):
        writer.add_array("test.integers", [1, -2, 3])
        writer.add_array("test.texts", ["a", "", "é汉🦜"])
        writer.add_bool("test.flag", True)
        writer.add_int64("test.big", -(2**62))
        writer.add_float64("test.precise", 0.1)

    path = small_file(tmp_path, config, tensors, metadata=extra, tokenizer=byte_level_vocabulary(byte_level_backend()))
    reader = GGUFReader(path)
    expected = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert GGUFFile(path).metadata == expected
    assert {t.name: tuple(reversed(t.shape.tolist())) for t in reader.tensors} == {
        name: info.shape for name, info in GGUFFile(path).tensors.items()
    }


def test_texts_of_an_array_are_had_one_by_one_and_all_together(tmp_path, config, tensors):
    texts = ["a", "", "é汉🦜", "last"]
    path = small_file(tmp_path, config, tensors, metadata=lambda writer: writer.add_array("test.texts", texts))
    found = GGUFFile(path).metadata["test.texts"]
    assert len(found) == 4 and list(found) == texts and found == texts and found != texts[:3]
    assert [found[i] for i in range(4)] == texts and [found[i] for i in range(-4, 0)] == texts
    assert found[1:3] == texts[1:3] and found[::-1] == texts[::-1] and "last" in found
    for index in (4, -5):
        with pytest.raises(IndexError):
            found[index]


def test_large_alignment(tmp_path, config, tensors):
    file = GGUFFile(small_file(tmp_path, config, tensors, alignment=64))
    assert file.alignment == 64
    for name, expected in tensors.items():
        np.testing.assert_array_equal(file.dequantize(name), expected)


def test_version_2_is_read_the_same(tmp_path, config, tensors):
    path = small_file(tmp_path, config, tensors)
    data = bytearray(path.read_bytes())
    data[4:8] = struct.pack("<I", 2)
    path.write_bytes(data)
    file = GGUFFile(path)
    assert file.version == 2
    np.testing.assert_array_equal(file.dequantize("model.norm.weight"), tensors["model.norm.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d[:0], "cannot read|cut short"),
        (lambda d: d[:3], "cut short"),
        (lambda d: b"GGML" + d[4:], "not a GGUF file"),
        (lambda d: d[:4] + struct.pack("<I", 1) + d[8:], "version 1"),
        (lambda d: d[:4] + struct.pack(">I", 3) + d[8:], "big-endian"),
        (lambda d: d[:8] + struct.pack("<Q", 2**60) + d[16:], "announces 1152921504606846976 tensors"),
        (lambda d: d[:16] + struct.pack("<Q", 2**63) + d[24:], "metadata entries"),
        (lambda d: d[:24] + struct.pack("<Q", 2**50) + d[32:], "cut short"),
        (lambda d: d[:-1000], "is cut short: tensor .* ends at byte"),
        (lambda d: d[: len(d) // 2], "cut short"),
    ],
)
def test_broken_files_are_refused_without_large_allocations(tmp_path, config, tensors, change, message):  # C091
    path = small_file(tmp_path, config, tensors, tokenizer=byte_level_vocabulary(byte_level_backend()))
    path.write_bytes(change(path.read_bytes()))
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError, match=message):
            GGUFFile(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_file_cut_anywhere_in_its_header_is_refused(tmp_path, config, tensors):
    path = small_file(tmp_path, config, tensors)
    data = path.read_bytes()
    header_len = min(info.offset for info in GGUFFile(path).tensors.values())
    for length in range(0, header_len, 7):
        path.write_bytes(data[:length])
        with pytest.raises(ModelLoadError):
            GGUFFile(path)


def test_flipped_header_bytes_never_raise_anything_else(tmp_path, config, tensors):
    path = small_file(tmp_path, config, tensors)
    data = path.read_bytes()
    header_len = min(info.offset for info in GGUFFile(path).tensors.values())
    rng = np.random.default_rng(0)
    outcomes = set()
    for _ in range(300):
        broken = bytearray(data)
        for at in rng.integers(4, header_len, 3):
            broken[at] = rng.integers(0, 256)
        path.write_bytes(broken)
        try:
            file = GGUFFile(path)
            file.config()
            for name in file.tensor_names():
                file.quantized(name)
            outcomes.add("read")
        except ModelLoadError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


def test_bogus_array_count(tmp_path, config, tensors):
    path = small_file(tmp_path, config, tensors, metadata=lambda w: w.add_array("test.marker", [1, 2, 3]))
    data = path.read_bytes()
    at = data.index(b"test.marker") + len(b"test.marker") + 8
    path.write_bytes(data[:at] + struct.pack("<Q", 2**61) + data[at + 8 :])
    with pytest.raises(ModelLoadError, match=r"items of 'test\.marker'"):
        GGUFFile(path)
