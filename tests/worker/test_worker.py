"""A worker from settings and files to tokens: what an executor sees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagedserve.config import CacheConfig, ModelConfig, SchedulerConfig
from pagedserve.errors import ConfigError
from pagedserve.kernels import native
from pagedserve.model_files import resolve
from pagedserve.sampling_params import SamplingParams
from pagedserve.step import NewSequence, SchedulerOutput
from pagedserve.worker.worker import Worker
from tests.helpers.checkpoints import tiny_llama
from tests.worker.driver import execute

PROMPT = [(31 * i * i + 7 * i) % 320 for i in range(21)]
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    if native.available():
        native.set_num_threads(before)


def make_worker(checkpoint: Path, cache: dict | None = None, **model: Any) -> Worker:
    settings = ModelConfig(**{"model": str(checkpoint), "device": "cpu", "num_threads": 1, **model})
    worker = Worker(
        settings,
        CacheConfig(**{"num_device_blocks": 16, **(cache or {})}),
        SchedulerConfig(max_num_seqs=4),
        resolve(str(checkpoint)),
        lambda phase: None,
    )
    worker.load_model()
    return worker


def generate(worker: Worker, num_tokens: int) -> list[int]:
    """Greedy continuation of PROMPT, with blocks 3, 4, 5 ... of 16 tokens."""
    tokens = list(PROMPT)
    new = NewSequence(
        seq_id=5,
        token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        num_computed_tokens=0,
        block_ids=[3, 4, 5, 6],
        sampling_params=GREEDY,
        seed=0,
        choice_index=0,
    )
    computed = 0
    for step in range(num_tokens):
        output = execute(
            worker,
            SchedulerOutput(
                step_id=step,
                new=[new] if step == 0 else [],
                seq_ids=[5],
                num_scheduled=[len(tokens) - computed],
                num_computed=[computed],
                new_block_ids=[[]],
            ),
        )
        computed = len(tokens)
        tokens += output.sampled_token_ids[0]
    execute(worker, SchedulerOutput(step_id=num_tokens, released=[5]))
    return tokens[len(PROMPT) :]


def expected_tokens(checkpoint: Path, num_tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    generated = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return generated[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("backend", [None, "reference"])
def test_greedy_equals_transformers(checkpoint: Path, backend: str | None) -> None:
    worker = make_worker(checkpoint, attention_backend=backend)
    worker.allocate(worker.plan_memory())
    assert generate(worker, 12) == expected_tokens(checkpoint, 12)
    # Once more: what the first left behind in its blocks and its row must not matter.
    assert generate(worker, 12) == expected_tokens(checkpoint, 12)


def test_plan_counts_what_the_pools_will_hold(checkpoint: Path) -> None:
    cache = {"num_device_blocks": 9, "block_size": 8, "kv_cache_dtype": "float32"}
    worker = make_worker(checkpoint, cache=cache)
    plan = worker.plan_memory()
    # Keys and values, 2 layers, 2 KV heads of 16, float32.
    assert plan.spec.bytes_per_block == 2 * 2 * 2 * 16 * 4 * 8
    assert plan.spec.bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert (plan.spec.num_layers, plan.spec.num_kv_heads, plan.spec.head_dim) == (2, 2, 16)
    assert (plan.spec.block_size, plan.spec.dtype) == (8, "float32")
    assert (plan.num_device_blocks, plan.num_host_blocks) == (9, 9)
    assert plan.kv_bytes == 9 * plan.spec.bytes_per_block
    file_size = (checkpoint / "model.safetensors").stat().st_size
    assert 0.9 * file_size < plan.weights_bytes < 2 * file_size


def test_half_precision_kv_halves_the_blocks(checkpoint: Path) -> None:
    whole = make_worker(checkpoint, cache={"kv_cache_dtype": "float32"}).plan_memory().spec
    half = make_worker(checkpoint, cache={"kv_cache_dtype": "bfloat16"}).plan_memory().spec
    default = make_worker(checkpoint).plan_memory().spec
    assert (half.dtype, default.dtype) == ("bfloat16", "float16")
    assert 2 * half.bytes_per_block == 2 * default.bytes_per_block == whole.bytes_per_block


def test_an_8_bit_kv_cache_counts_its_scales(checkpoint: Path) -> None:
    spec = make_worker(checkpoint, cache={"kv_cache_dtype": "int8", "block_size": 8}).plan_memory().spec
    assert spec.dtype == "int8"
    # Keys and values, 2 layers, 2 KV heads, 8 tokens: 16 codes and a scale of 4 bytes.
    assert spec.bytes_per_block == 2 * 2 * 2 * 8 * (16 + 4)


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "float16", "int8"])
def test_smaller_kv_serves(checkpoint: Path, kv_cache_dtype: str) -> None:
    worker = make_worker(checkpoint, cache={"kv_cache_dtype": kv_cache_dtype})
    worker.allocate(worker.plan_memory())
    tokens = generate(worker, 4)
    assert len(tokens) == 4 and tokens[0] == expected_tokens(checkpoint, 1)[0]


def test_fp8_kv_serves_under_both_names(checkpoint: Path) -> None:
    answers = []
    for name in ("fp8", "fp8_e4m3"):
        worker = make_worker(checkpoint, cache={"kv_cache_dtype": name})
        plan = worker.plan_memory()
        assert plan.spec.dtype == "float8_e4m3fn"
        worker.allocate(plan)
        answers.append(generate(worker, 4))
    assert answers[0] == answers[1] and len(answers[0]) == 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_activations_serve(checkpoint: Path, dtype: str) -> None:
    worker = make_worker(checkpoint, dtype=dtype)
    plan = worker.plan_memory()
    assert plan.spec.dtype == dtype
    worker.allocate(plan)
    assert len(generate(worker, 3)) == 3


def test_length_is_the_models_or_less(checkpoint: Path) -> None:
    assert make_worker(checkpoint).max_model_len() == 512
    assert make_worker(checkpoint, max_model_len=100).max_model_len() == 100
    with pytest.raises(ConfigError, match="--max-model-len 513"):
        make_worker(checkpoint, max_model_len=513)


def test_dummy_weights_need_no_weight_files(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    worker = Worker(
        ModelConfig(model=str(tmp_path), device="cpu", num_threads=1, load_format="dummy"),
        CacheConfig(num_device_blocks=16),
        SchedulerConfig(max_num_seqs=4),
        resolve(str(tmp_path), require_weights=False),
        lambda phase: None,
    )
    worker.load_model()
    worker.allocate(worker.plan_memory())
    assert worker.vocab_size == 320
    assert len(generate(worker, 3)) == 3


def test_what_is_not_there_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="unknown attention backend"):
        make_worker(checkpoint, attention_backend="magic")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="--device cuda"):
            make_worker(checkpoint, device="cuda")


def test_threads_as_asked_and_given_back(checkpoint: Path) -> None:
    torch.set_num_threads(2)
    worker = make_worker(checkpoint, num_threads=3)
    if native.available():
        # Torch's own threads would only be in the way of the native ones.
        assert (native.num_threads(), torch.get_num_threads()) == (3, 1)
    else:
        assert torch.get_num_threads() == 3
    worker.shutdown()
    assert torch.get_num_threads() == 2
    make_worker(checkpoint, num_threads=3, dtype="bfloat16")
    assert torch.get_num_threads() == 3


def test_shutdown_twice(checkpoint: Path) -> None:
    worker = make_worker(checkpoint)
    worker.allocate(worker.plan_memory())
    worker.shutdown()
    worker.shutdown()
