"""Every native architecture against transformers' eager attention, on a tiny random checkpoint that transformers made.

One entry in CASES proves an architecture: logits over a prompt and 32 decoded tokens within 1e-4 in fp32, greedy ids
equal, by hand over paged KV and through the whole engine, in chunks of 1, 7 and 64, with and without prefix cache.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pagedserve import LLM, SamplingParams, gguf_architectures
from pagedserve.errors import ModelLoadError
from pagedserve.kernels import native
from pagedserve.model_files import resolve
from pagedserve.models import ARCHITECTURES, FALLBACK, model_class
from pagedserve.quantization.packed import PackedMethod
from pagedserve.registry import load
from tests.helpers.byte_tokenizer import VOCAB_SIZE
from tests.helpers.gguf_models import write_gguf
from tests.helpers.hf_checkpoints import GPT_SIZES, SIZES, write_random
from tests.helpers.paged_model import PagedModel

PROMPT_LEN, NUM_TOKENS = 45, 32
CHUNKS = (1, 7, 64)
# Two best logits nearer than this could be swapped by another order of additions.
MIN_MARGIN = 1e-3


@dataclass(frozen=True)
class Case:
    """A config of transformers: its model_type, and what differs from SIZES (or replaces it)."""

    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=lambda: SIZES)
    max_model_len: int | None = None
    size: float = 1.5  # of the random weights


OPT_SIZES = {**{k: v for k, v in SIZES.items() if k not in ("intermediate_size", "num_key_value_heads")}, "ffn_dim": 96}
LONGROPE = {
    "pad_token_id": 0,
    "original_max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.05 * i for i in range(8)],
        "long_factor": [1.5 + 0.7 * i for i in range(8)],
    },
}
GEMMA = {
    "head_dim": 24,
    "num_hidden_layers": 4,
    "query_pre_attn_scalar": 20,
    "sliding_window": 9,
    "sliding_window_pattern": 3,
}
QWEN_MOE = {"num_experts": 6, "moe_intermediate_size": 32, "num_experts_per_tok": 3, "head_dim": 24}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
WINDOW = 9  # far below PROMPT_LEN + NUM_TOKENS

CASES: dict[str, Case] = {
    "llama": Case("llama"),
    "mistral with a window": Case("mistral", {"sliding_window": WINDOW}),
    "mistral": Case("mistral", {"sliding_window": None, "head_dim": 24}),
    "qwen2": Case("qwen2"),
    "qwen2 with windows": Case(
        "qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "num_hidden_layers": 3}
    ),
    "qwen3": Case("qwen3", {"head_dim": 32}),
    "qwen3 with biases, tied": Case("qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "mixtral": Case("mixtral", {"num_local_experts": 4}),
    "mixtral with a window": Case(
        "mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": WINDOW}
    ),
    "qwen3_moe": Case("qwen3_moe", QWEN_MOE),
    "qwen3_moe, released": Case("qwen3_moe", {**QWEN_MOE, "norm_topk_prob": True, "head_dim": 32}),
    "qwen3_moe, some layers dense": Case(
        "qwen3_moe", {**QWEN_MOE, "norm_topk_prob": True, "num_hidden_layers": 4, "decoder_sparse_step": 2}
    ),
    "olmoe": Case("olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "olmoe, normalised": Case(
        "olmoe", {"num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True, "num_key_value_heads": 4}
    ),
    "gemma2": Case("gemma2", GEMMA, size=1.0),
    "gemma2 as released": Case("gemma2", {**GEMMA, "query_pre_attn_scalar": 32, "head_dim": 32}, size=1.0),
    "gemma2 without caps": Case(
        "gemma2",
        {
            **GEMMA,
            "query_pre_attn_scalar": 200,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
        },
        size=1.0,
    ),
    "gemma3": Case("gemma3_text", GEMMA, size=1.0),
    "gemma3 as released": Case(
        "gemma3_text",
        {
            **GEMMA,
            "query_pre_attn_scalar": 32,
            "head_dim": 32,
            "num_hidden_layers": 6,
            "sliding_window_pattern": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        size=1.0,
    ),
    "gemma3, stretched": Case(
        "gemma3_text",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            },
        },
        size=1.0,
    ),
    "gemma3 that can also see": Case(
        "gemma3",
        {"text_config": {**SIZES, **GEMMA}, "vision_config": VISION, "mm_tokens_per_image": 4, "image_token_index": 3},
        {},
    ),
    "phi3": Case("phi3", {"pad_token_id": 0}),
    "phi3 with a window, partly rotated": Case(
        "phi3", {"pad_token_id": 0, "sliding_window": WINDOW, "partial_rotary_factor": 0.75}
    ),
    "phi3, short texts": Case("phi3", LONGROPE, max_model_len=128),
    "phi3, long texts": Case("phi3", {**LONGROPE, "original_max_position_embeddings": 32}),
    "smollm3": Case("smollm3", {"num_hidden_layers": 4, "pad_token_id": 0}),
    "smollm3 with windows": Case(
        "smollm3",
        {
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
        },
    ),
    "olmo2": Case("olmo2", {"attention_bias": True}),
    "olmo2 as released": Case("olmo2"),
    "granite": Case(
        "granite",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.11,
            "residual_multiplier": 0.22,
            "logits_scaling": 4.0,
            "tie_word_embeddings": True,
        },
    ),
    "opt": Case("opt", sizes=OPT_SIZES),
    "gpt2": Case("gpt2", sizes=GPT_SIZES),
    "gpt2, other sizes": Case(
        "gpt2", {"n_inner": 96, "activation_function": "relu", "tie_word_embeddings": False}, GPT_SIZES
    ),
    "gpt_neox": Case("gpt_neox"),
    "gpt_neox, one after the other": Case(
        "gpt_neox",
        {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0, "hidden_act": "gelu_new"},
    ),
}


@dataclass(frozen=True)
class Oracle:
    """A checkpoint, and what transformers makes of a prompt: greedy ids, and logits before each of the tokens."""

    folder: Path
    prompt: list[int]
    output: list[int]
    logits: torch.Tensor  # fp32 [PROMPT_LEN + NUM_TOKENS, vocab]


_oracles: dict[str, Oracle] = {}


@pytest.fixture
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    name = request.param
    if name not in _oracles:
        case = CASES[name]
        folder = tmp_path_factory.mktemp("architecture")
        for seed in range(20):
            settings = {**case.sizes, **case.changes}
            model = write_random(folder, case.model_type, seed=seed, size=case.size, tokenizer=True, **settings)
            found = _greedy(model)
            if found is not None:
                break
        assert found is not None, "no random model of this config can tell its best token from the second"
        _oracles[name] = Oracle(folder, *found)
    return _oracles[name]


@torch.inference_mode()
def _greedy(model: Any) -> tuple[list[int], list[int], torch.Tensor] | None:
    """One whole forward a token: no cache that could be wrong. None where two tokens are too near to call."""
    prompt = random.Random(7).choices(range(4, VOCAB_SIZE), k=PROMPT_LEN)
    ids = list(prompt)
    for _ in range(NUM_TOKENS):
        best = model(torch.tensor([ids]), use_cache=False).logits[0, -1].topk(2)
        if best.values[0] - best.values[1] < MIN_MARGIN:
            return None
        ids.append(int(best.indices[0]))
    return prompt, ids[PROMPT_LEN:], model(torch.tensor([ids]), use_cache=False).logits[0]


MIXTURES = ("mixtral", "qwen3_moe", "olmoe")

# GGUF architecture -> the case whose checkpoint is written as such a file. "llama" itself is in test_loader.py.
GGUF_CASES = {
    "llama": "mixtral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe, released",
    "gemma2": "gemma2 as released",
    "gemma3": "gemma3 as released",
    "smollm3": "smollm3",
    "olmo2": "olmo2 as released",
    "olmoe": "olmoe",
    "phi3": "phi3, long texts",
}

every_case = pytest.mark.parametrize("oracle", CASES, indirect=True)


def test_every_architecture_has_a_case() -> None:
    proved = {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[case.model_type] for case in CASES.values()}
    assert proved >= set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"do_layer_norm_before": False}, "do_layer_norm_before false"),
        ({"word_embed_proj_dim": 32}, "word_embed_proj_dim 32"),
        ({"enable_bias": False}, "enable_bias false"),
    ],
)
def test_what_a_native_class_does_not_compute_is_left_to_the_fallback(changes: dict[str, Any], reason: str) -> None:
    """OPT-350M, for one, normalises behind its layers."""
    config = {"architectures": ["OPTForCausalLM"], "model_type": "opt", **OPT_SIZES}
    assert model_class(config) is not load(FALLBACK)
    assert model_class({**config, **changes}) is load(FALLBACK)
    with pytest.raises(ModelLoadError, match=f"OPT with {reason} is not native"):
        model_class({**config, **changes}, "native")


@every_case
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_logits_equal_transformers(oracle: Oracle, backend: str, request: pytest.FixtureRequest) -> None:  # C092
    if backend == "cpu" and not native.available():
        pytest.skip("the native CPU library is not built")
    assert model_class(resolve(str(oracle.folder)).config) is not load(FALLBACK)
    case = CASES[request.node.callspec.params["oracle"]]
    ids = oracle.prompt + oracle.output
    paged = PagedModel(oracle.folder, backend=backend, max_model_len=case.max_model_len)
    # The reference goes row by row in Python: where there are kernels, they show what chunks change.
    for seq_id, chunk in enumerate(CHUNKS if backend == "cpu" or not native.available() else (7,)):
        found = torch.cat(
            (
                paged.logits(oracle.prompt, chunk=chunk, seq_id=seq_id),
                paged.logits(oracle.output, chunk=1 if chunk == 7 else chunk, seq_id=seq_id),
            )
        )
        torch.testing.assert_close(found, oracle.logits[: len(ids)], atol=1e-4, rtol=1e-4)


def test_the_readme_lists_what_there_is() -> None:
    """Architectures of the table, GGUF architectures that have a case, and their number."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| .* \| natively \| (.*) \|$", text, re.MULTILINE)
    assert [name for name, _ in rows] == list(ARCHITECTURES)
    assert f"| {len(rows)} architectures natively" in text
    named = {kind for _, formats in rows for kind in re.findall(r"GGUF `(\w+)`", formats)}
    assert named == set(GGUF_CASES)


@every_case
def test_steps_are_captured_as_a_program(oracle: Oracle, request: pytest.FixtureRequest) -> None:
    """No architecture does arithmetic that a step program cannot express."""
    if not native.available():
        pytest.skip("steps are captured with the native CPU library, which is not built")
    is_mixture = CASES[request.node.callspec.params["oracle"]].model_type in MIXTURES
    with LLM(
        str(oracle.folder), num_device_blocks=64, num_threads=1, model_impl="native", kv_cache_dtype="float32"
    ) as llm:
        op_names = llm.engine.client.core._executor._worker._runner._runner.graph.op_names
    assert op_names
    assert is_mixture == ("ps_experts_sum" in op_names) == ("ps_route" in op_names)


def test_every_gguf_architecture_has_a_case() -> None:
    assert set(GGUF_CASES) == set(gguf_architectures.ARCHITECTURES)


@pytest.mark.parametrize(("name", "oracle"), GGUF_CASES.items(), indirect=["oracle"], ids=GGUF_CASES)
def test_gguf_files_give_the_logits_of_their_originals(tmp_path: Path, name: str, oracle: Oracle) -> None:
    path = write_gguf(tmp_path / "model.gguf", name, oracle.folder)
    found = PagedModel(path).logits(oracle.prompt + oracle.output, chunk=16)
    torch.testing.assert_close(found, oracle.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "oracle"), GGUF_CASES.items(), indirect=["oracle"], ids=GGUF_CASES)
def test_quantised_gguf_files_are_served_packed(tmp_path: Path, name: str, oracle: Oracle) -> None:
    """The file's own 8 bits through native kernels, against the same numbers dequantised."""
    if not native.available():
        pytest.skip("the native CPU library is not built")
    path = write_gguf(tmp_path / "model.gguf", name, oracle.folder, quant="Q8_0")
    dense = PagedModel(path).logits(oracle.prompt, chunk=16)
    packed = PagedModel(path, backend="cpu", quant=PackedMethod("auto")).logits(oracle.prompt, chunk=7)
    assert (packed - dense).abs().mean() < 0.01 * dense.std()


@pytest.mark.parametrize("oracle", ["qwen2", "gpt2", "opt", "gpt_neox", "phi3", "mixtral"], indirect=True)
@pytest.mark.parametrize(("weights_dtype", "limit"), [("int8", 0.03), ("int4", 0.4)])
def test_quantised_while_loading(oracle: Oracle, weights_dtype: str, limit: float) -> None:
    """Biases, fused, transposed and expert matrices in integers: near the original, and the better the more bits."""
    if not native.available():
        pytest.skip("integer weights need the native CPU library, which is not built")
    found = PagedModel(oracle.folder, backend="cpu", quant=PackedMethod(weights_dtype)).logits(oracle.prompt, chunk=16)
    expected = oracle.logits[:PROMPT_LEN]
    assert 1e-4 < (found - expected).abs().mean() / expected.std() < limit


@every_case
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_the_engine_answers_as_transformers(
    oracle: Oracle, chunk: int, prefix_cache: bool, request: pytest.FixtureRequest
) -> None:
    """The prompt twice, the second time with what the first left in the cache, and once beside a stranger."""
    case = CASES[request.node.callspec.params["oracle"]]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    settings = {"max_num_batched_tokens": chunk, "enable_prefix_caching": prefix_cache, "max_num_seqs": 4}
    if case.max_model_len is not None:
        settings["max_model_len"] = case.max_model_len
    settings = {"num_device_blocks": 64, "num_threads": 1, "kv_cache_dtype": "float32", **settings}
    with LLM(str(oracle.folder), model_impl="native", **settings) as llm:
        for prompts in ([oracle.prompt], [oracle.prompt, oracle.prompt[:20]]):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert outputs[0].outputs[0].token_ids == oracle.output
        assert (outputs[0].num_cached_tokens or 0) > 0 if prefix_cache else not outputs[0].num_cached_tokens


@every_case
def test_dummy_weights_take_every_architecture(oracle: Oracle) -> None:
    """Benchmarks without files: random weights of the same shapes, and every token has its say."""
    paged = PagedModel(oracle.folder, dummy_seed=3)
    logits = paged.logits(oracle.prompt, chunk=16)
    assert logits.isfinite().all() and logits.std(dim=0).min() > 0


def test_gpt2_as_it_was_first_released(tmp_path: Path) -> None:
    """Names without the model around them, and causal masks among the weights."""
    model = write_random(tmp_path, "gpt2", **GPT_SIZES)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    assert "wte.weight" in renamed
    for layer in range(2):
        renamed[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 512, 512).tril()
    save_file(renamed, tmp_path / "model.safetensors")
    prompt = list(range(4, 30))
    with torch.inference_mode():
        expected = model(torch.tensor([prompt]), use_cache=False).logits[0]
    torch.testing.assert_close(PagedModel(tmp_path).logits(prompt, chunk=7), expected, atol=1e-4, rtol=1e-4)


def test_a_vision_checkpoint_of_the_first_release(tmp_path: Path) -> None:
    """Gemma 3 was published with other names around its text part."""
    model = write_random(tmp_path, "gemma3", **CASES["gemma3 that can also see"].changes)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {}
    for name, value in tensors.items():
        if name.startswith("model.language_model."):
            name = "language_model.model." + name.removeprefix("model.language_model.")
        renamed[name.removeprefix("model.") if name.startswith(("model.vision", "model.multi")) else name] = value
    assert any(name.startswith("language_model.model.") for name in renamed)
    save_file(renamed, tmp_path / "model.safetensors")
    prompt = list(range(4, 30))
    with torch.inference_mode():
        expected = model(torch.tensor([prompt]), use_cache=False).logits[0]
    torch.testing.assert_close(PagedModel(tmp_path).logits(prompt, chunk=7), expected, atol=1e-4, rtol=1e-4)
