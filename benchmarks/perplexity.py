"""What a weight format costs in quality: perplexity through the engine, against the same weights in fp32.

    python benchmarks/perplexity.py                                  the demo model, as its file is and in other formats
    python benchmarks/perplexity.py --model FILE --formats auto,int8,int4 --text book.txt --json
    python benchmarks/perplexity.py --formats float32/bfloat16,float32/int8 --check float32/int8   KV cache dtypes

The baseline is `--weights-dtype float32`: GGUF integers dequantised exactly, fp32 products, so that the loss is that
of the format's products (activations rounded to 16, 15 or 12 bits) and of whatever it quantises. Without --text the
text is Python's language reference as the standard library ships it. Exits with 1 when a format named in --check loses
more than --limit.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from pagedserve import LLM, SamplingParams
from pagedserve.config import DEFAULT_MODEL

BASELINE = "float32"


@dataclass
class Result:
    format: str
    perplexity: float
    loss_percent: float  # growth of perplexity over the baseline
    max_nll_change: float  # of one window, in nats a token
    greedy_agreement: float  # share of positions whose most likely token is the baseline's


@dataclass
class Reading:
    window_nll: list[float]  # nats a token, one for each window
    best_ids: list[int]  # the most likely token at each position

    @property
    def nll(self) -> float:
        return math.fsum(self.window_nll) / len(self.window_nll)


def reference_text() -> str:
    """English prose with code in it, about 700 kB."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def read(model: str, fmt: str, text: str, num_tokens: int, window: int) -> Reading:
    """Teacher-forced log-probabilities of the text, in windows that know nothing of each other.

    `fmt` is a weights dtype, or one and a KV cache dtype: "auto/int8".
    """
    weights_dtype, _, kv_cache_dtype = fmt.partition("/")
    num_blocks = (window // 16 + 2) * 8
    with LLM(
        model=model,
        weights_dtype=weights_dtype,
        kv_cache_dtype=kv_cache_dtype or "auto",
        num_device_blocks=num_blocks,
        enable_prefix_caching=False,
    ) as llm:
        ids = llm.engine.tokenizer.encode(text[: num_tokens * 16])[:num_tokens]
        windows = [ids[i : i + window] for i in range(0, len(ids) - window + 1, window)]
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
        outputs = llm.generate(windows, params, use_tqdm=False)
    reading = Reading([], [])
    for output in outputs:
        if output.error is not None or output.prompt_logprobs is None:
            sys.exit(f"{fmt}: {output.error or 'no log-probabilities came back'}")
        entries = [entry for entry in output.prompt_logprobs if entry is not None]
        reading.window_nll.append(-math.fsum(entry.logprobs[0] for entry in entries) / len(entries))
        reading.best_ids += [
            entry.token_ids[1] if len(entry.token_ids) > 1 else entry.token_ids[0] for entry in entries
        ]
    return reading


def compare(fmt: str, reading: Reading, baseline: Reading) -> Result:
    pairs = zip(reading.window_nll, baseline.window_nll, strict=True)
    same = sum(a == b for a, b in zip(reading.best_ids, baseline.best_ids, strict=True))
    return Result(
        format=fmt,
        perplexity=math.exp(reading.nll),
        loss_percent=100 * (math.exp(reading.nll - baseline.nll) - 1),
        max_nll_change=max(a - b for a, b in pairs),
        greedy_agreement=same / len(baseline.best_ids),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--formats", default="auto,bfloat16,int8,int4")
    parser.add_argument("--text", type=Path, help="a UTF-8 file to read instead of the language reference")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--check", default="auto", help="formats whose loss decides the exit status")
    parser.add_argument("--limit", type=float, default=1.0, help="greatest loss in percent of the formats of --check")
    parser.add_argument("--json", action="store_true", help="one JSON line instead of the table")
    args = parser.parse_args()

    text = args.text.read_text(encoding="utf-8") if args.text else reference_text()
    baseline = read(args.model, BASELINE, text, args.tokens, args.window)
    results = []
    for fmt in [BASELINE, *args.formats.split(",")]:
        reading = baseline if fmt == BASELINE else read(args.model, fmt, text, args.tokens, args.window)
        results.append(compare(fmt, reading, baseline))
    num_tokens = len(baseline.window_nll) * args.window
    if args.json:
        print(json.dumps({"model": args.model, "tokens": num_tokens, "results": [asdict(r) for r in results]}))
    else:
        print(f"{args.model}: {num_tokens} tokens in windows of {args.window}")
        print(f"{'format':18}{'perplexity':>12}{'loss':>9}{'worst window':>14}{'greedy':>9}")
        for r in results:
            print(
                f"{r.format:18}{r.perplexity:12.4f}{r.loss_percent:8.2f}%{r.max_nll_change:+14.4f}"
                f"{r.greedy_agreement:9.4f}"
            )
    checked = args.check.split(",")
    sys.exit(any(r.loss_percent > args.limit for r in results if r.format in checked))


if __name__ == "__main__":
    main()
