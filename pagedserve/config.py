"""All settings, as frozen dataclasses: one a room, so that a class takes the slice it needs.

`EngineConfig` holds the slices and is passed whole only to the places that build the rooms. Command-line flags are made
from these fields (`flag()` carries the help text), so a default is written once. What is found out at run time (number
of blocks, the model's length) lives in `step.MemoryPlan` and `ModelConfig`, never written back into a setting.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from typing import Any

from pagedserve.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m-instruct"


def flag(default: Any = MISSING, *, help: str, choices: tuple[str, ...] | None = None, alias: str | None = None) -> Any:
    """A field that is also a command-line flag: `max_num_seqs` becomes `--max-num-seqs`."""
    return field(default=default, metadata={"help": help, "choices": choices, "alias": alias})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is computed."""

    model: str = flag(
        DEFAULT_MODEL, help="folder with safetensors, a .gguf file, a catalog name, or a hub id", alias="-m"
    )
    tokenizer: str | None = flag(None, help="folder or .gguf to take the tokenizer from (default: the model's own)")
    skip_tokenizer_init: bool = flag(False, help="run without a tokenizer: prompts and outputs are token ids alone")
    revision: str | None = flag(None, help="hub revision (branch, tag or commit)")
    dtype: str = flag("auto", help="type of activations", choices=("auto", "float32", "bfloat16", "float16"))
    weights_dtype: str = flag(
        "auto",
        help="how weights are held: auto keeps what the file has; int8 and int4 quantise while loading",
        choices=("auto", "float32", "bfloat16", "int8", "int4"),
    )
    max_model_len: int | None = flag(None, help="longest sequence, prompt and output together (default: the model's)")
    load_format: str = flag(
        "auto",
        help="auto, or dummy: random weights, for benchmarks; a folder with only config.json will do",
        choices=("auto", "dummy"),
    )
    model_impl: str = flag(
        "auto",
        help="who computes the model: native, transformers (with our attention), or auto: native where there is one",
        choices=("auto", "native", "transformers"),
    )
    attention_backend: str | None = flag(None, help="force an attention backend (default: the first that fits)")
    enforce_eager: bool = flag(False, help="run every step op by op: no CUDA graphs, and on CPUs no step program")
    device: str = flag("auto", help="auto, cpu or cuda", choices=("auto", "cpu", "cuda"))
    num_threads: int | None = flag(None, help="threads of the CPU kernels (default: the cores this process may use)")
    seed: int = flag(0, help="seed of whatever is random in loading (dummy weights)")

    def __post_init__(self) -> None:
        _at_least("--max-model-len", self.max_model_len, 1)
        _at_least("--num-threads", self.num_threads, 1)
        if self.skip_tokenizer_init and self.tokenizer is not None:
            raise ConfigError("--skip-tokenizer-init and --tokenizer contradict each other; leave one of them out")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV cache: blocks, pools, prefix sharing."""

    block_size: int = flag(16, help="tokens a KV block holds")
    gpu_memory_utilization: float = flag(
        0.9,
        help="share of the memory free after the weights that the KV pool takes (on CPU: half of that share)",
    )
    kv_cache_memory: str | None = flag(None, help="size of the KV pool instead of a share, such as 2GiB or 500MB")
    kv_cache_resident: str = flag(
        "auto",
        help="KV memory that a CPU server keeps for cached prefixes when running requests need less (auto: as much as "
        "the weights take, 512MiB at least; with a KV pool of a given size, all of it)",
    )
    num_device_blocks: int | None = flag(None, help="size of the KV pool in blocks (tests and experiments)")
    kv_cache_dtype: str = flag(
        "auto",
        help="type of keys and values (auto: float16 on CPUs, as activations on GPUs; int8, fp8_e4m3: a scale per "
        "token and head; fp8 is the latter, on GPUs)",
        choices=("auto", "float32", "bfloat16", "float16", "int8", "fp8_e4m3", "fp8"),
    )
    swap_space: str = flag("4GiB", help="host pool for preempted requests (never larger than the KV pool); 0: none")
    enable_prefix_caching: bool = flag(True, help="share the KV blocks of equal prompt prefixes")

    def __post_init__(self) -> None:
        if self.block_size not in (1, 2, 4, 8, 16, 32, 64, 128):
            raise ConfigError(f"--block-size {self.block_size}: use a power of two from 1 to 128")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"--gpu-memory-utilization {self.gpu_memory_utilization}: use a share in (0, 1]")
        _at_least("--num-device-blocks", self.num_device_blocks, 1)
        if self.kv_cache_memory is not None:
            parse_bytes(self.kv_cache_memory, "--kv-cache-memory")
        if self.kv_cache_resident != "auto":
            parse_bytes(self.kv_cache_resident, "--kv-cache-resident")
        parse_bytes(self.swap_space, "--swap-space")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Who runs when, and what happens when memory or patience run out."""

    max_num_batched_tokens: int = flag(2048, help="tokens a step may compute, prompts and decodes together")
    max_num_seqs: int = flag(128, help="sequences that may run at once")
    max_queue_len: int = flag(1024, help="waiting requests beyond which new ones get 429 (0: no limit)")
    policy: str = flag(
        "fcfs", help="order of waiting requests", choices=("fcfs", "priority"), alias="--scheduling-policy"
    )
    preemption_mode: str = flag(
        "auto", help="what happens to a victim's blocks: auto takes the cheaper", choices=("auto", "swap", "recompute")
    )
    async_scheduling: bool | None = flag(
        None,
        help="decide the next step while one runs (default: where the device computes beside the host, as GPUs do)",
    )
    watermark: float = flag(0.01, help="share of the blocks kept free when new requests are admitted")
    request_timeout: float | None = flag(None, help="seconds a request may take unless it says otherwise")

    def __post_init__(self) -> None:
        _at_least("--max-num-batched-tokens", self.max_num_batched_tokens, 1)
        _at_least("--max-num-seqs", self.max_num_seqs, 1)
        _at_least("--max-queue-len", self.max_queue_len, 0)
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"--watermark {self.watermark}: use a share in [0, 1)")
        if self.request_timeout is not None and not self.request_timeout > 0:
            raise ConfigError(f"--request-timeout {self.request_timeout}: use a number of seconds above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Where the workers run."""

    executor: str = flag(
        "inline",
        help="how workers are driven; null computes nothing, to measure the server",
        choices=("inline", "null"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontConfig:
    """The engine's front: templates, defaults, limits that concern what clients ask."""

    chat_template: str | None = flag(None, help="Jinja template, a file or inline (default: the model's own)")
    generation_config: str = flag(
        "auto",
        help="auto: defaults of sampling from the model's generation_config.json; ignore: the API's own",
        choices=("auto", "ignore"),
    )
    pooling_type: str = flag(
        "auto",
        help="how embeddings are pooled: last token, mean, or auto: as the model's files say, else last",
        choices=("auto", "last", "mean"),
    )
    max_logprobs: int = flag(20, help="most logprobs a request may ask for")
    health_timeout: float = flag(60.0, help="seconds a step may take before /health turns 503")

    def __post_init__(self) -> None:
        _at_least("--max-logprobs", self.max_logprobs, 0)
        if not self.health_timeout > 0:
            raise ConfigError(f"--health-timeout {self.health_timeout}: use a number of seconds above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputConfig:
    """Grammars of structured output: what one may cost before it is refused."""

    max_grammar_size: str = flag("256KiB", help="largest JSON schema, regex or grammar that a request may bring")
    grammar_timeout: float = flag(5.0, help="seconds that compiling a grammar may take before its request gets 400")
    grammar_cache_size: int = flag(256, help="compiled grammars that are kept")

    def __post_init__(self) -> None:
        parse_bytes(self.max_grammar_size, "--max-grammar-size")
        if not self.grammar_timeout > 0:
            raise ConfigError(f"--grammar-timeout {self.grammar_timeout}: use a number of seconds above 0")
        _at_least("--grammar-cache-size", self.grammar_cache_size, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server."""

    host: str = flag("127.0.0.1", help="address to listen on")
    port: int = flag(8000, help="port to listen on (0: any free one)")
    ssl_certfile: str | None = flag(None, help="PEM certificate chain: serve HTTPS")
    ssl_keyfile: str | None = flag(None, help="PEM private key (default: in the file of --ssl-certfile)")
    ssl_ca_certs: str | None = flag(None, help="PEM authorities, one of which must have signed a client's certificate")
    served_model_name: tuple[str, ...] = flag((), help="names clients may use (default: the model's name)")
    api_key: tuple[str, ...] = flag((), help="key that clients must send; may be given several times")
    allowed_origins: tuple[str, ...] = flag((), help="origins of browsers that may call (CORS; default: none)")
    strict: bool = flag(False, help="answer unknown request fields with 400 instead of a warning header")
    shutdown_timeout: float = flag(30.0, help="seconds that running requests get after SIGTERM")
    tool_call_parser: str = flag("auto", help="format of tool calls: auto (by the chat template), none, or a name")
    reasoning_parser: str = flag("auto", help="format of reasoning: auto (by the chat template), none, or a name")
    max_body_size: str = flag("32MiB", help="largest request body")
    log_level: str = flag("info", help="debug, info, warning or error", choices=("debug", "info", "warning", "error"))
    log_format: str = flag("text", help="one line a record, for people or for machines", choices=("text", "json"))
    log_requests: bool = flag(False, help="log one line a request")
    data_dir: str | None = flag(
        None, help="folder of files and batches, which then survive a restart (default: a temporary one)"
    )
    data_dir_quota: str = flag("8GiB", help="most bytes of uploaded files")
    batch_concurrency: int = flag(16, help="requests of a batch under way at once, behind all others")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port}: use a port from 0 to 65535")
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise ConfigError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
        if self.shutdown_timeout < 0:
            raise ConfigError(f"--shutdown-timeout {self.shutdown_timeout}: use 0 or more seconds")
        parse_bytes(self.max_body_size, "--max-body-size")
        parse_bytes(self.data_dir_quota, "--data-dir-quota")
        _at_least("--batch-concurrency", self.batch_concurrency, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What builds an engine; each room takes its own slice."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    front: FrontConfig = field(default_factory=FrontConfig)
    structured_output: StructuredOutputConfig = field(default_factory=StructuredOutputConfig)


_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[_letter] = _UNITS[_letter + "ib"] = 1024**_power
    _UNITS[_letter + "b"] = 1000**_power


def parse_bytes(text: str, name: str) -> int:
    """`"2GiB"`, `"500MB"`, `"4g"` or plain bytes as an int; ConfigError names the flag otherwise."""
    stripped = text.strip().lower()
    digits = stripped.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = stripped[len(digits) :].strip()
    try:
        value = float(digits)
    except ValueError:
        value = -1.0
    if unit not in _UNITS or not 0 <= value < 2**62:
        raise ConfigError(f"{name} {text!r}: use a size such as 2GiB, 500MB or a number of bytes")
    return int(value * _UNITS[unit])


def _at_least(name: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise ConfigError(f"{name} {value}: use {low} or more")
