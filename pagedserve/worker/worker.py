"""Worker: one device, from settings and files to executed steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from pagedserve import quantization
from pagedserve.attention import AttentionBackend, select
from pagedserve.config import CacheConfig, ModelConfig, SchedulerConfig
from pagedserve.errors import ConfigError
from pagedserve.kernels import native
from pagedserve.log import get_logger
from pagedserve.model_files import ModelFiles
from pagedserve.models.hf_config import resolve_max_model_len
from pagedserve.models.loader import load_model, parse_config
from pagedserve.models.planning import META, model_without_storage
from pagedserve.sampling.sampler import Sampler
from pagedserve.sampling_params import SamplingParams
from pagedserve.step import (
    KVCacheSpec,
    MemoryPlan,
    ModelRunnerOutput,
    NewSequence,
    SamplingInput,
    SchedulerOutput,
)
from pagedserve.worker.decode_graphs import DecodeShape
from pagedserve.worker.device import CudaDevice, Device, is_out_of_memory
from pagedserve.worker.device_queue import DeviceQueue, ThreadQueue
from pagedserve.worker.graphs import MakeGraph, graph_maker, is_captured
from pagedserve.worker.kernels_ahead import compile_ahead
from pagedserve.worker.kv_storage import KVStorage
from pagedserve.worker.layer_groups import kv_cache_spec, layer_places
from pagedserve.worker.memory import free_memory, make_plan, usable_cores
from pagedserve.worker.model_runner import ModelRunner
from pagedserve.worker.recovery import GuardedRunner, GuardedStep
from pagedserve.worker.rows import Rows
from pagedserve.worker.step_memory import StepMemory, measure_steps

if TYPE_CHECKING:
    from pagedserve.kernels.triton.warm_up import CompileAhead

logger = get_logger(__name__)


class Worker:
    """Called in this order: load_model, plan_memory, allocate, then submit, sample and result for each step.

    `vocab_limit` is the number of ids that the tokenizer can decode, where that is less than the model's vocabulary.
    """

    def __init__(
        self,
        model: ModelConfig,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        files: ModelFiles,
        progress: Callable[[str], None],
        *,
        vocab_limit: int | None = None,
    ) -> None:
        self._model_config = model
        self._cache = cache
        self._scheduler = scheduler
        self._files = files
        self._progress = progress
        self._vocab_limit = vocab_limit
        self._device = _device(model.device)
        self._dtype = activation_dtype(model.dtype, self._device, files)
        self._kv_dtype = kv_cache_dtype(cache, self._dtype, self._device)
        self._model: Any = None
        self._attention: AttentionBackend | None = None
        self._memory = CudaDevice(self._device) if self._device.type == "cuda" else Device()
        self._step_memory = StepMemory()
        self._compiling: CompileAhead | None = None
        self._runner: GuardedRunner | None = None
        self._max_model_len = 0
        self._outer_num_threads = torch.get_num_threads()
        # A GPU computes beside the host by itself, a CPU in a thread for it, where that is asked for.
        has_thread = self._device.type == "cpu" and bool(scheduler.async_scheduling)
        self._queue = ThreadQueue() if has_thread else DeviceQueue()

    def load_model(self) -> None:
        """Chooses the attention backend and reads the weights. Raises ModelLoadError or ConfigError."""
        settings = self._model_config
        if self._device.type == "cpu":
            torch.set_num_threads(settings.num_threads or usable_cores())
            if self._dtype is torch.float32 and native.available():
                # What is left to torch is small, and its threads would wait for cores on which native ones spin.
                native.set_num_threads(torch.get_num_threads())
                torch.set_num_threads(1)
        config = parse_config(self._files, settings.model_impl)
        self._max_model_len = resolve_max_model_len(config.max_model_len, settings.max_model_len)
        spec = config.attention_spec(
            block_size=self._cache.block_size,
            dtype=self._dtype,
            kv_cache_dtype=self._kv_dtype,
            device=self._device,
        )
        self._attention = select(spec, settings.attention_backend)(spec)
        quant = quantization.select(settings.weights_dtype, self._device, self._dtype)
        if self._device.type == "cuda":
            self._compile_ahead(config, quant)
        try:
            self._model = load_model(
                self._files,
                config,
                attention=self._attention,
                quant=quant,
                dtype=self._dtype,
                device=self._device,
                max_model_len=self._max_model_len,
                dummy_seed=settings.seed if settings.load_format == "dummy" else None,
                impl=settings.model_impl,
                use_packed_cache=True,
            )
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise ConfigError(
                f"the weights of {self._files.name} do not fit into the device's memory ({_first_line(error)}): use "
                "--weights-dtype int8 or int4, a smaller model or a larger device"
            ) from error
        logger.info("%s on %s in %s, attention: %s", self._files.name, self._device, self._dtype, self._attention.name)

    def max_model_len(self) -> int:
        """Longest sequence in tokens, prompt and output together."""
        return self._max_model_len

    @property
    def vocab_size(self) -> int:
        """Width of the model's logits."""
        return self._model.vocab_size

    def plan_memory(self) -> MemoryPlan:
        """Sizes of both pools from what is free beside the weights and the largest step, which a GPU runs to measure
        it. Raises ConfigError when nothing useful fits."""
        assert self._attention is not None, "load_model comes first"
        spec = kv_cache_spec(
            self._model,
            self._attention,
            kv_dtype=self._kv_dtype,
            block_size=self._cache.block_size,
            max_model_len=self._max_model_len,
        )
        if self._compiling is not None:
            seconds = self._compiling.wait()
            if self._compiling.num_variants:
                logger.info("%d kernels compiled in %.1f s, beside the weights", self._compiling.num_variants, seconds)
            self._compiling = None
        self._step_memory = self._measure_steps(spec)
        plan = make_plan(
            cache=self._cache,
            spec=spec,
            weights_bytes=self._model.weights_bytes,
            free_bytes=max(self._memory.free_bytes() - self._step_memory.total, 0),
            free_host_bytes=free_memory(torch.device("cpu")),
            max_num_seqs=self._scheduler.max_num_seqs,
            max_model_len=self._max_model_len,
            on_cpu=self._device.type == "cpu",
        )
        measured = self._step_memory
        return dataclasses.replace(plan, step_bytes=measured.step_bytes, graph_bytes=measured.graph_bytes)

    def allocate(self, plan: MemoryPlan) -> None:
        """Makes the pools of `plan` and runs one step, so that what cannot run fails now and not in a request."""
        assert self._attention is not None, "load_model comes first"
        shape = self._decode_shape(plan.spec)
        make_graph = graph_maker(self._attention, self._device, shape, enforce_eager=self._model_config.enforce_eager)
        try:
            runner, rows = self._make_runner(plan.spec, plan.num_device_blocks, plan.num_host_blocks, make_graph)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise ConfigError(
                f"a KV pool of {plan.kv_bytes / 2**30:.2f} GiB cannot be allocated although the memory seems free: "
                "lower --gpu-memory-utilization, --kv-cache-memory or --swap-space"
            ) from error
        self._runner = GuardedRunner(runner, rows, self._memory)
        self._progress("warming up")
        for step in _warm_up_steps(len(plan.spec.layer_groups)):
            running = self._runner.submit(step)
            self._runner.sample(running, SamplingInput(step_id=step.step_id))
            self._runner.result(running)

    @property
    def computes_beside_host(self) -> bool:
        """Whether a step runs while whoever submitted it goes on."""
        return self._device.type == "cuda"

    def submit(self, output: SchedulerOutput) -> GuardedStep:
        """Launches one step's forward."""
        assert self._runner is not None, "allocate comes first"
        return self._runner.submit(output)

    def sample(self, step: GuardedStep, sampling: SamplingInput) -> None:
        """Launches the step's draws; the results of all steps before it were asked for."""
        assert self._runner is not None, "allocate comes first"
        self._runner.sample(step, sampling)

    def result(self, step: GuardedStep) -> ModelRunnerOutput:
        """Waits for what the step drew."""
        assert self._runner is not None, "allocate comes first"
        return self._runner.result(step)

    def use_quiet_moment(self) -> bool:
        """Does one piece of work that makes later steps faster, while nobody waits; False where none is left."""
        assert self._runner is not None, "allocate comes first"
        return self._runner.capture_next()

    def _compile_ahead(self, config: Any, quant: quantization.QuantMethod) -> None:
        assert self._attention is not None
        kind, spec = type(self._attention), dataclasses.replace(self._attention.spec, device=META)

        def make() -> tuple[Any, AttentionBackend]:
            attention = kind(spec)
            model = model_without_storage(
                self._files,
                config,
                attention=attention,
                quant=quant,
                dtype=self._dtype,
                max_model_len=self._max_model_len,
                impl=self._model_config.model_impl,
                dummy=self._model_config.load_format == "dummy",
            )
            return model, attention

        major, minor = torch.cuda.get_device_capability(self._device)
        self._compiling = compile_ahead(make, capability=10 * major + minor)

    def _make_runner(
        self, spec: KVCacheSpec, num_device_blocks: int, num_host_blocks: int, make_graph: MakeGraph
    ) -> tuple[ModelRunner, Rows]:
        assert self._attention is not None, "load_model comes first"
        storage = KVStorage(
            num_device_blocks=num_device_blocks,
            num_host_blocks=num_host_blocks,
            num_layers=spec.num_layers_per_block,
            layer_block_shape=self._attention.layer_block_shape,
            dtype=self._kv_dtype,
            device=self._device,
        )
        rows = Rows(self._scheduler.max_num_seqs, spec.block_size, num_groups=len(spec.layer_groups))
        runner = ModelRunner(
            self._model,
            attention=self._attention,
            storage=storage,
            rows=rows,
            sampler=Sampler(self._model.vocab_size, self._vocab_limit),
            device=self._device,
            places=layer_places(spec.layer_groups),
            make_graph=make_graph,
            queue=self._queue,
        )
        return runner, rows

    def _decode_shape(self, spec: KVCacheSpec) -> DecodeShape:
        return DecodeShape(
            max_num_rows=self._scheduler.max_num_seqs,
            max_model_len=self._max_model_len,
            block_size=spec.block_size,
            num_groups=len(spec.layer_groups),
            activation_bytes=self._step_memory.decode_bytes,
        )

    def _measure_steps(self, spec: KVCacheSpec) -> StepMemory:
        assert self._attention is not None, "load_model comes first"
        eager = self._model_config.enforce_eager
        return measure_steps(
            self._memory,
            lambda make_graph: self._make_runner(spec, 1, 0, make_graph)[0],
            attention=self._attention,
            scheduler=self._scheduler,
            spec=spec,
            max_model_len=self._max_model_len,
            is_captured=is_captured(self._attention, self._device, enforce_eager=eager),
        )

    def shutdown(self) -> None:
        """Lets go of weights and pools, and gives the process its threads back; safe to call twice."""
        self._queue.close()
        torch.set_num_threads(self._outer_num_threads)
        self._runner = self._model = self._attention = None


def _device(name: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: torch sees no CUDA device here; use --device cpu")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def activation_dtype(name: str, device: torch.device, files: ModelFiles) -> torch.dtype:
    """The type of activations: by default float32 on CPUs (exact, and what their kernels take), on GPUs the half
    precision that the model was trained in."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cpu":
        return torch.float32
    stored = files.config.get("dtype", files.config.get("torch_dtype"))
    return torch.float16 if stored == "float16" else torch.bfloat16


def kv_cache_dtype(cache: CacheConfig, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type of keys and values: by default float16 on CPUs, where activations are float32 and reading the cache
    is what many sequences wait for; on GPUs that of the activations."""
    match cache.kv_cache_dtype:
        case "auto":
            return torch.float16 if device.type == "cpu" and dtype is torch.float32 else dtype
        case "fp8" | "fp8_e4m3":
            return torch.float8_e4m3fn
        case name:
            return getattr(torch, name)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _warm_up_steps(num_groups: int) -> list[SchedulerOutput]:
    """One token of a sequence that no scheduler sent, in a block that is still free; then the sequence is gone."""
    sequence = NewSequence(
        seq_id=-1,
        token_ids=[0],
        num_prompt_tokens=1,
        num_computed_tokens=0,
        block_ids=[0] * num_groups,
        sampling_params=SamplingParams(temperature=0.0),
        seed=0,
        choice_index=0,
    )
    compute = SchedulerOutput(
        step_id=-1, new=[sequence], seq_ids=[-1], num_scheduled=[1], num_computed=[0], new_block_ids=[[]]
    )
    return [compute, SchedulerOutput(step_id=-1, released=[-1])]
