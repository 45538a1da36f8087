"""Are the answers right: greedy tokens against transformers, and the same alone, in a batch and after preemption."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.attention import available
from benchmarks.gpu.check import Check, NotHereError

# Of the difference between the two best logits: in 16 bits, other orders of addition exchange those that are nearer.
_NEAR = {torch.float32: 0.0, torch.bfloat16: 0.15}


def run(check: Check) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        check.measure(f"transformers, {name}", lambda dtype=dtype: _against_transformers(check, dtype), needs=5.0)


def _against_transformers(check: Check, dtype: torch.dtype) -> None:
    import transformers

    name = str(dtype).removeprefix("torch.")
    config = transformers.LlamaConfig(
        vocab_size=2048,
        hidden_size=check.choose(full=512, quick=512, tiny=64),
        intermediate_size=check.choose(full=1024, quick=1024, tiny=96),
        num_hidden_layers=check.choose(full=6, quick=4, tiny=2),
        num_attention_heads=check.choose(full=8, quick=8, tiny=4),
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
    model = model.to(dtype)
    folder = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    model.save_pretrained(folder)
    model = model.to(check.device)
    rng = random.Random(0)
    lengths = check.choose(full=(5, 33, 200, 130, 17, 64), quick=(5, 33, 200), tiny=(5, 19))
    prompts = [[rng.randrange(2048) for _ in range(length)] for length in lengths]
    count = check.choose(full=48, quick=32, tiny=8)
    expected = [_greedy(model, prompt, count) for prompt in prompts]
    del model
    for label, settings in _ways(check).items():
        title = f"{label}, {name}"
        check.measure(title, lambda s=settings, t=title: _compare(check, t, folder, dtype, prompts, expected, s))
    check.measure(f"a batch's mates, {name}", lambda: _alone_or_not(check, folder, dtype, prompts, name))


def _ways(check: Check) -> dict[str, dict[str, Any]]:
    """Settings that change how tokens are computed and must not change which."""
    ways: dict[str, dict[str, Any]] = {
        "greedy as transformers": {},
        "greedy in small chunks": {"max_num_batched_tokens": 24},
        "greedy under preemption": {"num_device_blocks": 26, "max_num_seqs": 4, "swap_space": "64MiB"},
        "greedy without graphs": {"enforce_eager": True},
    }
    if check.on_gpu:
        ways |= {f"greedy on {backend}": {"attention_backend": backend} for backend in available()}
    return ways


def _greedy(model: Any, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Tokens, and by how much each one's logit leads."""
    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
    best = torch.stack([logits[0].float() for logits in output.logits]).topk(2).values
    return output.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()


def _generate(
    check: Check, folder: Path, dtype: torch.dtype, batches: list[list[list[int]]], count: int, settings: dict[str, Any]
) -> list[list[list[int]]]:
    """Greedy tokens of each batch of prompts, all by one engine."""
    from benchmarks.gpu.engine import capture
    from pagedserve import LLM, SamplingParams

    options = {"num_device_blocks": 600, "max_num_seqs": 64, "swap_space": "0", **settings}
    if not check.on_gpu:
        options["num_threads"] = 1
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    name = str(dtype).removeprefix("torch.")
    found = []
    _check_backend(check, folder, dtype, settings.get("attention_backend"))
    with LLM(str(folder), dtype=name, skip_tokenizer_init=True, device=check.device_name, **options) as llm:
        # Of sizes that were seen graphs are made, which the batches behind then run on.
        llm.generate(batches[0], params, use_tqdm=False)
        capture(llm)
        for prompts in batches:
            llm.reset_prefix_cache()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            if failed := [output.error for output in outputs if output.error]:
                raise RuntimeError(failed[0])
            found.append([output.outputs[0].token_ids for output in outputs])
    return found


def _check_backend(check: Check, folder: Path, dtype: torch.dtype, name: str | None) -> None:
    """NotHereError where the backend that is asked for cannot serve this model."""
    from pagedserve.attention import BACKENDS
    from pagedserve.model_files import resolve
    from pagedserve.models.loader import parse_config

    if name is None:
        return
    config = parse_config(resolve(str(folder)))
    spec = config.attention_spec(block_size=16, dtype=dtype, kv_cache_dtype=dtype, device=check.device)
    if (reason := BACKENDS.resolve(name).why_not(spec)) is not None:
        raise NotHereError(f"{name}: {reason}")


def _compare(
    check: Check,
    title: str,
    folder: Path,
    dtype: torch.dtype,
    prompts: list[list[int]],
    expected: list[tuple[list[int], list[float]]],
    settings: dict[str, Any],
) -> None:
    found = _generate(check, folder, dtype, [prompts], len(expected[0][0]), settings)[0]
    equal, wrong = 0, []
    for index, (ours, (theirs, leads)) in enumerate(zip(found, expected, strict=True)):
        place = next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
        if place is None:
            equal += 1
        elif leads[place] > _NEAR[dtype]:
            wrong.append(f"prompt {index} differs at token {place}, where the lead is {leads[place]:.3f}")
    check.check(title, not wrong, note="; ".join(wrong[:2]) or f"{equal} of {len(prompts)} wholly equal")


def _alone_or_not(check: Check, folder: Path, dtype: torch.dtype, prompts: list[list[int]], name: str) -> None:
    count = check.choose(full=48, quick=32, tiny=6)
    batch = prompts * check.choose(full=8, quick=4, tiny=2)
    *alone, together, again = _generate(check, folder, dtype, [[prompts[0]], [prompts[1]], batch, batch], count, {})
    equal = sum(tokens == together[i] for i, (tokens,) in enumerate(alone))
    check.check(f"the same batch twice, {name}", together == again, note=f"{len(together)} sequences")
    check.record(f"alone as in a batch of {len(together)}, {name}", equal, f"of {len(alone)}", note="greedy sequences")
