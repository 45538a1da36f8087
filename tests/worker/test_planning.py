"""A plan says what a worker that loads the model then finds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedserve.config import CacheConfig, ModelConfig, SchedulerConfig
from pagedserve.errors import ConfigError, ModelLoadError
from pagedserve.kernels import native
from pagedserve.model_files import resolve
from pagedserve.quantization.grouped import GroupedMethod
from pagedserve.quantization.none import DenseMethod
from pagedserve.step import LoadPlan, MemoryPlan
from pagedserve.worker.planning import activation_bytes, plan_loading
from pagedserve.worker.worker import Worker
from tests.helpers.checkpoints import llama_config, random_tensors, tiny_llama, write_checkpoint
from tests.helpers.gguf_models import write_gguf
from tests.helpers.hf_checkpoints import SIZES, write_random
from tests.helpers.paged_model import CPU, PagedModel
from tests.models.test_architectures import CASES
from tests.models.test_transformers_fallback import CASES as FALLBACK_CASES

SCHEDULER = SchedulerConfig(max_num_seqs=4)
GGUF_SIZES = {**SIZES, "hidden_size": 256, "intermediate_size": 512}


def plan(path: Path, cache: dict[str, Any] | None = None, card: int | None = None, **model: Any) -> LoadPlan:
    settings = ModelConfig(**{"model": str(path), "device": "cpu" if card is None else "auto", **model})
    pools = CacheConfig(**{"num_device_blocks": 24, "swap_space": "1MiB", **(cache or {})})
    files = resolve(str(path), require_weights=False, header_only=True)
    return plan_loading(settings, pools, SCHEDULER, files, card)


def found(path: Path, cache: dict[str, Any] | None = None, **model: Any) -> MemoryPlan:
    """What a worker finds after loading."""
    settings = ModelConfig(**{"model": str(path), "device": "cpu", "num_threads": 1, **model})
    pools = CacheConfig(**{"num_device_blocks": 24, "swap_space": "1MiB", **(cache or {})})
    files = resolve(str(path), require_weights=model.get("load_format") != "dummy")
    worker = Worker(settings, pools, SCHEDULER, files, lambda phase: None)
    try:
        worker.load_model()
        return worker.plan_memory()
    finally:
        worker.shutdown()


@pytest.fixture(autouse=True)
def keep_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PAGEDSERVE_CACHE_DIR", str(tmp_path / "cache"))
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    if native.available():
        native.set_num_threads(before)


@pytest.mark.parametrize("name", CASES)
def test_native_architectures_take_what_is_planned(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    write_random(tmp_path, case.model_type, **{**case.sizes, **case.changes})
    planned = plan(tmp_path, max_model_len=case.max_model_len)
    assert planned.memory == found(tmp_path, max_model_len=case.max_model_len)
    assert sum(planned.weights.values()) == planned.memory.weights_bytes
    assert "other" not in planned.weights


@pytest.mark.parametrize(
    "name", [name for name in FALLBACK_CASES if name.startswith(("Cohere 2", "Granite", "GPT-2: C"))]
)
def test_models_of_transformers_take_what_is_planned(tmp_path: Path, name: str) -> None:
    model_type, config = FALLBACK_CASES[name]
    write_random(tmp_path, model_type, **config)
    assert plan(tmp_path, model_impl="transformers").memory == found(tmp_path, model_impl="transformers")


@pytest.mark.parametrize("weights_dtype", ["auto", "int8", "int4", "bfloat16"])
@pytest.mark.parametrize("quant", ["F32", "F16", "Q8_0", "Q4_0"])
def test_gguf_files_take_what_is_planned(tmp_path: Path, quant: str, weights_dtype: str) -> None:
    write_random(tmp_path / "hf", "llama", **GGUF_SIZES)
    path = write_gguf(tmp_path / "model.gguf", "llama", tmp_path / "hf", quant=quant)
    assert plan(path, weights_dtype=weights_dtype).memory == found(path, weights_dtype=weights_dtype)


def test_the_header_of_a_gguf_file_is_enough(tmp_path: Path) -> None:
    write_random(tmp_path / "hf", "llama", **GGUF_SIZES)
    path = write_gguf(tmp_path / "model.gguf", "llama", tmp_path / "hf", quant="Q8_0")
    whole = plan(path)
    content = path.read_bytes()
    first = min(tensor.offset for tensor in _tensors(path))
    path.write_bytes(content[:first])
    assert dataclasses.replace(plan(path), free_bytes=0) == dataclasses.replace(whole, free_bytes=0)
    with pytest.raises(ModelLoadError, match="is cut short"):
        found(path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_config_is_enough(tmp_path: Path, dtype: str) -> None:
    folder = tiny_llama(tmp_path, dtype=dtype)
    with_weights = plan(folder).memory
    (folder / "model.safetensors").unlink()
    assert plan(folder).memory == with_weights
    dummy = found(folder, load_format="dummy")
    assert dummy == with_weights


@pytest.mark.parametrize("repeats", [True, False])
def test_a_tied_models_own_head_counts_where_it_differs(tmp_path: Path, repeats: bool) -> None:
    tensors = random_tensors(llama_config())
    if repeats:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    folder = write_checkpoint(tmp_path, llama_config(tie_word_embeddings=True), tensors, tokenizer=False)
    planned = plan(folder)
    assert planned.memory == found(folder)
    assert ("output head" in planned.weights) is not repeats


@pytest.mark.parametrize(
    "cache",
    [
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "bfloat16", "block_size": 32},
        {"kv_cache_memory": "3MiB", "num_device_blocks": None},
    ],
)
def test_pools_are_those_of_the_worker(tmp_path: Path, cache: dict[str, Any]) -> None:
    write_random(tmp_path, "gemma3_text", **{**SIZES, **CASES["gemma3"].changes})
    assert plan(tmp_path, cache).memory == found(tmp_path, cache)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral", "qwen3 with biases, tied", "gpt2", "opt"])
def test_a_card_holds_dense_weights_of_the_activations_type(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    write_random(tmp_path, case.model_type, dtype=torch.bfloat16, **{**case.sizes, **case.changes})
    dense = DenseMethod("auto", CPU, torch.bfloat16)
    loaded = PagedModel(tmp_path, dtype=torch.bfloat16, quant=dense, max_model_len=case.max_model_len)
    planned = plan(tmp_path, card=8 << 30, max_model_len=case.max_model_len)
    assert planned.memory.weights_bytes == loaded.model.weights_bytes
    assert (planned.device, planned.dtype, planned.memory.spec.dtype) == ("cuda", "bfloat16", "bfloat16")


@pytest.mark.parametrize(
    ("quant", "weights_dtype"), [("Q8_0", "auto"), ("Q4_0", "auto"), ("F16", "int8"), ("F16", "int4")]
)
def test_a_card_holds_groups_of_8_and_4_bits(tmp_path: Path, quant: str, weights_dtype: str) -> None:
    write_random(tmp_path / "hf", "llama", **GGUF_SIZES)
    path = write_gguf(tmp_path / "model.gguf", "llama", tmp_path / "hf", quant=quant)
    method = GroupedMethod(weights_dtype, CPU, torch.bfloat16)
    loaded = PagedModel(path, dtype=torch.bfloat16, quant=method).model
    planned = plan(path, card=8 << 30, weights_dtype=weights_dtype).memory.weights_bytes
    # On CPUs the embedding stays as the file has it; on a card it has the type of the activations.
    table = SIZES["vocab_size"] * GGUF_SIZES["hidden_size"]
    assert planned - 2 * table == loaded.weights_bytes - loaded.embed_tokens.nbytes


def test_a_token_reads_no_tables_and_only_its_experts(tmp_path: Path) -> None:
    write_random(tmp_path, "mixtral", dtype=torch.bfloat16, **{**SIZES, "num_local_experts": 4})
    planned = plan(tmp_path, card=8 << 30)
    sizes = planned.weights
    assert planned.read_bytes == planned.memory.weights_bytes - sizes["embeddings"] - sizes["rotary tables"] - (
        sizes["experts"] // 2
    )
    assert planned.multiplications * 2 == planned.read_bytes - sizes["norms"]


def test_weights_larger_than_the_card_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use a larger device"):
        plan(tiny_llama(tmp_path), card=1 << 30)


def test_activations_grow_with_the_step(tmp_path: Path) -> None:
    config = _config(tiny_llama(tmp_path, vocab_size=320))
    small = SchedulerConfig(max_num_batched_tokens=1024, max_num_seqs=1)
    large = SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=1)
    half, whole = (activation_bytes(config, scheduler, torch.bfloat16) for scheduler in (small, large))
    assert whole == 2 * half > 0


def _config(folder: Path) -> Any:
    from pagedserve.models.loader import parse_config

    return parse_config(resolve(str(folder)))


def _tensors(path: Path) -> list[Any]:
    from pagedserve.gguf_file import GGUFFile

    return list(GGUFFile(path).tensors.values())
