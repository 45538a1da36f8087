"""Decode and prefill speed of `pagedserve.LLM`, without a server: what other engines' own batch benches measure.

    python benchmarks/offline_decode.py --weights-dtype bfloat16 --json

Decode: N sequences of 128 prompt tokens; the time of 65 tokens less the time of 1, so that the prompt does not count.
Prefill: a prompt of 512 tokens and one answer token. Prefix caching is off; figures are medians of --repeats.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

from machine import idle_share

from pagedserve import LLM, SamplingParams
from pagedserve.config import DEFAULT_MODEL


def seconds(llm: LLM, prompts: list[list[int]], max_tokens: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--weights-dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="short prompts and answers: to see that it works")
    parser.add_argument("--json", action="store_true", help="one JSON line instead of the table")
    args = parser.parse_args()

    num_decoded, decode_prompt, prefill_prompt = (4, 8, 32) if args.quick else (64, 128, 512)
    rng = random.Random(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[rng.randrange(100, 40000) for _ in range(length)] for _ in range(count)]

    result: dict[str, float] = {"idle": round(idle_share(), 3)}
    with LLM(
        model=args.model,
        weights_dtype=args.weights_dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        enable_prefix_caching=False,
        max_model_len=1024,
    ) as llm:
        seconds(llm, prompts(2, 16), 4)
        for batch in map(int, args.batches.split(",")):
            rates = []
            for _ in range(args.repeats):
                work = prompts(batch, decode_prompt)
                first = seconds(llm, work, 1)
                rates.append(batch * num_decoded / (seconds(llm, work, 1 + num_decoded) - first))
            result[f"decode_{batch}"] = round(statistics.median(rates), 1)
        rates = [prefill_prompt / seconds(llm, prompts(1, prefill_prompt), 1) for _ in range(args.repeats)]
        result["prefill_512"] = round(statistics.median(rates), 1)
    if args.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:14}{value:10.1f}")


if __name__ == "__main__":
    main()
