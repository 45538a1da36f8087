"""Weights through staging buffers: the same bits as from mapped files, and no second copy in host memory."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pagedserve.errors import ModelLoadError
from pagedserve.models import loader
from pagedserve.models.sources import DummySource, SafetensorsSource
from pagedserve.models.streaming import Staging, StreamedSource
from pagedserve.quantization.none import DenseMethod
from tests.helpers.checkpoints import tiny_llama
from tests.helpers.hf_checkpoints import write_random
from tests.helpers.paged_model import CPU, PagedModel
from tests.models.test_architectures import CASES

PROMPT = [(37 * i * i + 11 * i + 5) % 320 for i in range(25)]


def write_tensors(path: Path) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "large": torch.randn(300, 70, generator=generator),
        "half": torch.randn(5, 7, generator=generator).half(),
        "brain": torch.randn(129, 3, generator=generator).bfloat16(),
        "double": torch.randn(11, generator=generator, dtype=torch.float64),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }
    save_file(tensors, path)
    return tensors


@pytest.mark.parametrize("buffer_bytes", [1, 100, 4096, 1 << 20])
def test_every_tensor_arrives_whole(tmp_path: Path, buffer_bytes: int) -> None:
    tensors = write_tensors(tmp_path / "a.safetensors")
    if buffer_bytes == 1:  # a byte at a time is slow
        tensors = {name: value for name, value in tensors.items() if name != "large"}
    source = StreamedSource([tmp_path / "a.safetensors"], CPU, buffer_bytes=buffer_bytes)
    for name, value in tensors.items():
        wanted = value.float() if value.dtype is torch.float64 else value
        assert torch.equal(source.dense(name), wanted), name
        assert source.dense(name).dtype is wanted.dtype
    source.close()


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "gemma3", "mixtral", "opt"])
def test_models_compute_the_same(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    write_random(tmp_path, case.model_type, **{**case.sizes, **case.changes})
    dense = DenseMethod("auto", CPU, torch.float32)
    mapped = PagedModel(tmp_path, quant=dense, max_model_len=case.max_model_len).logits(PROMPT, chunk=9)
    monkeypatch.setattr(loader, "STREAMED_DEVICES", ("cpu",))
    streamed = PagedModel(tmp_path, quant=dense, max_model_len=case.max_model_len).logits(PROMPT, chunk=9)
    assert torch.equal(mapped, streamed)


def test_shards_stream_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = DenseMethod("auto", CPU, torch.float32)
    whole = PagedModel(tiny_llama(tmp_path / "a", tokenizer=False), quant=dense).logits(PROMPT, chunk=9)
    monkeypatch.setattr(loader, "STREAMED_DEVICES", ("cpu",))
    sharded = PagedModel(tiny_llama(tmp_path / "b", tokenizer=False, num_shards=3), quant=dense)
    assert torch.equal(sharded.logits(PROMPT, chunk=9), whole)


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path)
    source = StreamedSource([path], CPU)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(ModelLoadError, match=r"a\.safetensors ended while it was read"):
        for name in source.names():
            source.dense(name)
    source.close()


class Stream:
    """A stream that copies whenever it likes: only who waits for its events may touch what it reads."""

    def __init__(self) -> None:
        self.waited_for: list[object] = []
        self.events: list[SimpleNamespace] = []

    def wait_stream(self, other: object) -> None:
        self.waited_for.append(other)

    def record_event(self) -> SimpleNamespace:
        event = SimpleNamespace(done=False)
        event.synchronize = lambda: setattr(event, "done", True)
        self.events.append(event)
        return event


def test_a_buffer_is_filled_again_only_when_it_was_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(i * 7 % 251 for i in range(1000))
    (tmp_path / "file").write_bytes(content)
    staging, side, current = Staging(CPU, 64), Stream(), Stream()
    staging._stream = side
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    read, reads = staging._read, []

    def watched(staged: torch.Tensor, *arguments: object) -> None:
        # Of all copies but the one out of the other buffer, the end was waited for.
        assert all(event.done for event in side.events[:-1])
        reads.append(staged.data_ptr())
        read(staged, *arguments)

    monkeypatch.setattr(staging, "_read", watched)
    target = torch.zeros(1000, dtype=torch.uint8)
    with (tmp_path / "file").open("rb") as file:
        for _ in range(2):
            staging.fill(target.zero_(), file.fileno(), 0, tmp_path / "file")
            assert bytes(target.tolist()) == content
    assert len(reads) == 2 * 16
    assert all(first != second for first, second in itertools.pairwise(reads))
    # The side stream waits for what used the target's memory before, and what comes after waits for the copies.
    assert side.waited_for == [current, current]
    assert current.waited_for == [side, side]
    staging.close()
    assert all(event.done for event in side.events)


def test_integers_are_refused(tmp_path: Path) -> None:
    save_file({"codes": torch.zeros(4, dtype=torch.int32)}, tmp_path / "a.safetensors")
    source = StreamedSource([tmp_path / "a.safetensors"], CPU)
    with pytest.raises(ModelLoadError, match="has type I32"):
        source.dense("codes")
    source.close()


# Prints by how much loading raises the process's resident memory at its highest, and the bytes of the weights.
_PEAK = """
import sys, torch
from pathlib import Path
from pagedserve.models import loader
from pagedserve.quantization.none import DenseMethod
from tests.helpers.paged_model import CPU, PagedModel
torch.set_num_threads(1)
loader.STREAMED_DEVICES = ("cpu",)
loader.StreamedSource.__init__.__kwdefaults__["buffer_bytes"] = 1 << 20
def load(path):
    dense = DenseMethod("auto", CPU, torch.bfloat16)
    return PagedModel(Path(path), dtype=torch.bfloat16, quant=dense, num_blocks=1).model.weights_bytes
def highest():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))
load(sys.argv[1])  # imports, threads
Path("/proc/self/clear_refs").write_text("5")
before = highest()
weights = load(sys.argv[2])
print(highest() - before, weights)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc to see peaks")
def test_host_memory_holds_no_second_copy(tmp_path: Path) -> None:
    tiny = tiny_llama(tmp_path / "tiny", dtype="bfloat16", tokenizer=False)
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 8192}
    large = tiny_llama(tmp_path / "large", dtype="bfloat16", tokenizer=False, **sizes)
    done = subprocess.run([sys.executable, "-c", _PEAK, tiny, large], capture_output=True, text=True, check=True)
    peak, weights = map(int, done.stdout.split())
    # Beside the weights: buffers, and the parts of one stacked matrix. With mapped files it is 1.8 times the weights.
    assert peak < 1.3 * weights


def test_dummy_weights_are_those_of_their_seed() -> None:
    def draw(seed: int) -> list[torch.Tensor]:
        source = DummySource(seed, torch.bfloat16, CPU)
        for name, shape in (("a.weight", (40, 30)), ("b.weight", (7, 5)), ("n.weight", (9,)), ("n.bias", (9,))):
            source.expect(name, shape)
        return [source.dense(name) for name in source.names()]

    once, again, other = draw(1), draw(1), draw(2)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    assert not torch.equal(once[0], other[0])
    assert np.isclose(once[0].float().std().item(), 30**-0.5, rtol=0.1)
    assert once[2].unique().tolist() == [1.0]
    assert once[3].unique().tolist() == [0.0]


def test_mapped_files_are_still_what_cpus_read(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a.safetensors")
    assert type(loader._source(_files(tmp_path), CPU)) is SafetensorsSource


def _files(folder: Path) -> object:
    return SimpleNamespace(gguf=None, weight_files=(folder / "a.safetensors",))
