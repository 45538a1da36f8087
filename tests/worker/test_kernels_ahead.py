"""A model's kernels are known without weights, and compiled in other processes into the cache that serving reads."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagedserve.attention import AttentionSpec
from pagedserve.attention.reference import ReferenceBackend
from pagedserve.model_files import resolve
from pagedserve.models.loader import parse_config
from pagedserve.models.planning import META, model_without_storage
from pagedserve.quantization.none import DenseMethod
from pagedserve.worker.kernels_ahead import compile_ahead, launches_of
from tests.helpers.checkpoints import llama_config, random_tensors, write_checkpoint

pytest.importorskip("triton", reason="Triton is not installed")


class Silent(ReferenceBackend):
    """Attention that launches nothing."""

    def forward(self, query, key, value, kv_cache, metadata, *, sliding_window=None):
        return torch.empty_like(query)


def write(folder: Path, num_layers: int) -> Path:
    config = llama_config(hidden_size=128, intermediate_size=256, num_hidden_layers=num_layers)
    return write_checkpoint(folder, config, random_tensors(config), tokenizer=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("llama"), 2)


def make(checkpoint: Path, kind: type[ReferenceBackend] = Silent) -> tuple[object, ReferenceBackend]:
    files = resolve(str(checkpoint))
    config = parse_config(files, "auto")
    spec: AttentionSpec = config.attention_spec(
        block_size=16, dtype=torch.bfloat16, kv_cache_dtype=torch.bfloat16, device=META
    )
    attention = kind(spec)
    model = model_without_storage(
        files, config, attention=attention, quant=DenseMethod(), dtype=torch.bfloat16, max_model_len=64
    )
    return model, attention


def test_what_a_model_launches_is_known_without_its_weights(checkpoint: Path, tmp_path: Path) -> None:
    from pagedserve.kernels.triton.warm_up import distinct

    variants = distinct(launches_of(*make(checkpoint)))
    names = {variant.kernel.fn.__name__ for variant in variants}
    assert {name.split("_")[0] for name in names} >= {"rms", "rotary", "embedding", "sample"}, names
    assert len(variants) < 20, "each once, not once a layer"
    assert not [v for v in variants if any("meta" in str(kind) for kind in v.signature.values())]
    assert len(distinct(launches_of(*make(write(tmp_path, 4))))) == len(variants), "more layers launch nothing new"


def test_attention_in_triton_is_known_too(checkpoint: Path) -> None:
    from pagedserve.attention.triton import TritonBackend
    from pagedserve.kernels.triton.warm_up import distinct

    silent = {variant.kernel.fn.__name__ for variant in distinct(launches_of(*make(checkpoint)))}
    variants = distinct(launches_of(*make(checkpoint, TritonBackend)))
    more = {variant.kernel.fn.__name__ for variant in variants} - silent
    assert any("decode" in name for name in more) and any("prefill" in name for name in more), more


def test_ops_on_meta_tensors_are_a_gpus_only_while_launches_are_collected(checkpoint: Path) -> None:
    from pagedserve.kernels import ops

    launches_of(*make(checkpoint))
    x = torch.empty(3, 64, device=META)
    assert ops.rms_norm(x, x[0], 1e-5).is_meta  # by the reference: a launch would need a driver


def test_what_cannot_be_known_ahead_is_said(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="pagedserve"):
        assert compile_ahead(lambda: make(checkpoint, ReferenceBackend), capability=90) is None
    assert "kernels are compiled at their first launch" in caplog.text


# In a process of its own: Triton's driver and cache folder are settings of a process.
SCRIPT = """
import sys
import torch
from pathlib import Path
from pagedserve.kernels import gpu
from pagedserve.kernels.triton.variants import collecting
from pagedserve.kernels.triton.warm_up import CompileAhead, compile_for, distinct

def cubins():
    return sorted(path.name + str(path.stat().st_mtime_ns) for path in Path(sys.argv[1]).rglob("*.cubin"))

x = torch.empty(48, 128, dtype=torch.bfloat16, device="meta")
with collecting() as launches:
    for _ in range(3):
        gpu.rms_norm(x, x[0], 1e-5, None, None)
        gpu.gated_activation("silu", x, None)
ahead = CompileAhead(launches, 90, num_processes=2)
assert ahead.num_variants == 2 and ahead.wait() > 0
compiled = cubins()
assert len(compiled) == 2, compiled
again = CompileAhead(launches, 90)
assert again.num_variants == 0 and again.wait() >= 0, "a start that finds all there compiles nothing"
compile_for(distinct(launches), 90)  # as serving does it: by Triton's own way from arguments to a kernel
assert cubins() == compiled, "what was compiled ahead is not what serving asks for"
other = CompileAhead(launches[:1], 80, num_processes=1)
assert other.num_variants == 1 and other.wait() > 0 and len(cubins()) == 3, "another GPU"
"""


def test_what_is_compiled_ahead_is_what_the_first_launch_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
