"""What structured output costs: the share of a step that goes into following grammars, making masks and applying them.

Run `python benchmarks/structured_output.py [--batch 32] [--tokens 60] [--model NAME]`. A batch of equal requests under
a JSON schema decodes on the real engine, in one process; the time inside the grammar's own calls (in the core: tokens
followed, masks filled; in the worker: masks unpacked and applied) is set against the steps that they are part of. Both
are CPU time of the thread that steps, which computes in every kernel, so the share says nearly the same on a busy
machine; the wall time beside them does not. The goal: under 5 % of a step at batch 32 on the demo model.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.machine import idle_share
from pagedserve import LLM, SamplingParams, StructuredOutput
from pagedserve.engine.core import EngineCore
from pagedserve.kernels import ops
from pagedserve.sampling.batch import TokenMasks
from pagedserve.scheduler.constraints import ConstrainedStop, Constraints

STRING = {"type": "string", "minLength": 20, "maxLength": 60}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": STRING,
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": STRING, "minItems": 4, "maxItems": 8},
        "address": {
            "type": "object",
            "properties": {"street": STRING, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
# What is measured: name -> the owner of the function, and the function.
PARTS: dict[str, tuple[Any, str]] = {
    "masks_filled": (Constraints, "write_masks"),
    "tokens_followed": (ConstrainedStop, "reason"),
    "masks_unpacked": (TokenMasks, "unpack"),
    "masks_applied": (ops, "apply_token_bitmask"),
}


class Stopwatch:
    """CPU seconds inside functions, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, name: str, owner: Any, attribute: str) -> None:
        """From now on the function's time is counted."""
        function: Callable[..., Any] = getattr(owner, attribute)
        self.seconds[name] = 0.0

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.thread_time() - started

        setattr(owner, attribute, staticmethod(timed) if isinstance(owner.__dict__[attribute], classmethod) else timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=60)
    args = parser.parse_args()

    with LLM(model=args.model, max_model_len=1024) as llm:
        prompts = [f"Person number {i}, described as JSON:\n" for i in range(args.batch)]
        schema = StructuredOutput.json_schema(SCHEMA)
        params = SamplingParams(max_tokens=args.tokens, temperature=0.7, seed=1, structured_output=schema)
        # The first run compiles the grammar; the second one is what a served schema costs.
        llm.generate(prompts, params.with_(max_tokens=4), use_tqdm=False)
        watch = Stopwatch()
        for name, (owner, attribute) in PARTS.items():
            watch.wrap(name, owner, attribute)
        watch.wrap("steps", EngineCore, "step")
        before = llm.engine.stats.num_steps
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        wall = time.perf_counter() - started
        num_steps = llm.engine.stats.num_steps - before
        failed = [output.error for output in outputs if output.error]
        if failed:
            raise SystemExit(f"a request failed: {failed[0]}")
    total = watch.seconds.pop("steps")
    result = {
        "benchmark": "structured_output",
        "model": args.model,
        "batch": args.batch,
        "num_steps": num_steps,
        "cpu_ms_per_step": round(1e3 * total / num_steps, 2),
        "wall_ms_per_step": round(1e3 * wall / num_steps, 2),
        "share_of_step": round(sum(watch.seconds.values()) / total, 4),
        "shares": {name: round(seconds / total, 4) for name, seconds in watch.seconds.items()},
        "cpu_ms_per_step_of": {name: round(1e3 * seconds / num_steps, 3) for name, seconds in watch.seconds.items()},
        "idle_cpu_after": round(idle_share(), 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
