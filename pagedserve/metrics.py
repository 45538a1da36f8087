"""Prometheus metrics of one served model, under vLLM's names so that dashboards work; our own start with `pagedserve:`.

Fed by the API process from the core's statistics (totals, so a lost message loses nothing) and from the life of each
request. Nothing in here may ever fail a request: a mistake is logged once and swallowed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pagedserve.config import CacheConfig
from pagedserve.errors import QueueFullError
from pagedserve.log import get_logger
from pagedserve.messages import SchedulerStats
from pagedserve.outputs import RequestMetrics
from pagedserve.sampling_params import SamplingParams
from pagedserve.step import MemoryPlan

log = get_logger(__name__)

TIME_TO_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
ITERATION_TOKEN_BUCKETS = (1, *(2**power for power in range(3, 15)))
NUM_CHOICES_BUCKETS = (1, 2, 5, 10, 20)
PREEMPTION_BUCKETS = (0, 1, 2, 5, 10, 20, 50)

# SchedulerStats field -> (metric, help): totals of the core.
_TOTALS = {
    "num_preemptions": ("vllm:num_preemptions", "Times that a running request gave up its KV blocks."),
    "prefix_cache_queries": ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "num_wasted_tokens": ("pagedserve:wasted_tokens", "Tokens computed again after a preemption."),
    "num_swapped_out_blocks": ("pagedserve:swapped_out_blocks", "KV blocks moved to the host pool."),
    "num_swapped_in_blocks": ("pagedserve:swapped_in_blocks", "KV blocks moved back from the host pool."),
    "num_copied_blocks": ("pagedserve:copied_blocks", "KV blocks copied before a write (copy-on-write)."),
    "num_steps": ("pagedserve:steps", "Steps of the model."),
}
# SchedulerStats field -> (metric, help): state of the core.
_STATES = {
    "num_running": ("vllm:num_requests_running", "Requests in the running batch."),
    "num_waiting": ("vllm:num_requests_waiting", "Requests that wait to be admitted."),
    "num_swapped": ("pagedserve:num_requests_swapped", "Requests whose KV blocks are in the host pool."),
    "kv_cache_usage": ("vllm:kv_cache_usage_perc", "Share of the device's KV blocks in use (0 to 1)."),
    "host_cache_usage": ("pagedserve:host_cache_usage_perc", "Share of the host pool's blocks in use (0 to 1)."),
}


class ObservedChoice(Protocol):
    """What metrics read of one output."""

    finish_reason: str | None
    token_ids: list[int]


class ObservedRequest(Protocol):
    """What metrics read of a request; `counted_*` belong to the metrics and say what was counted already."""

    metrics: RequestMetrics
    is_finished: bool
    num_cached_tokens: int
    counted_prompt: bool
    counted_tokens: int
    counted_time: float | None

    @property
    def error(self) -> Exception | None: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def params(self) -> SamplingParams: ...
    @property
    def choices(self) -> list[Any]: ...
    @property
    def returned(self) -> list[Any]: ...


class WeightedHistogram(Collector):
    """A histogram that takes the same value many times at once: what every token of a step would cost is paid once.

    For one thread, the event loop's, which also renders the page.
    """

    def __init__(self, name: str, text: str, model_name: str, buckets: Iterable[float]):
        self._name, self._text, self._model_name = name, text, model_name
        self._bounds = [float(bound) for bound in buckets]
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """`count` observations of `value`."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[Metric]:
        """The family as it is exposed: counts are cumulative."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        family.add_metric([self._model_name], list(zip(names, accumulate(self._counts), strict=True)), self._sum)
        yield family


@dataclass(slots=True)
class _StepNews:
    """What a step adds over all its requests."""

    num_tokens: int = 0
    intervals: dict[float, int] = field(default_factory=dict)


class EngineMetrics:
    """All metric families of one model, in a registry of their own."""

    def __init__(self, model_name: str, *, max_model_len: int = 32768):
        # A second series for each counter, which nobody reads.
        disable_created_metrics()
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._last = SchedulerStats()
        self._reported: set[str] = set()
        self._totals = {field: self._counter(*spec) for field, spec in _TOTALS.items()}
        self._states = {field: self._gauge(*spec) for field, spec in _STATES.items()}
        token_buckets = _one_two_five(max_model_len)

        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that were served.")
        self._cached_tokens = self._counter("vllm:prompt_tokens_cached", "Prompt tokens taken from the prefix cache.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Generated tokens.")
        self._success = Counter(
            "vllm:request_success",
            "Choices that clients got of finished requests, by the reason why they ended.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused because the queue was full.",
            ["model_name", "reason"],
            registry=self.registry,
        )
        self._queue_full = self._rejections.labels(model_name, "max_num_queued_reqs")
        self._iteration_tokens = WeightedHistogram(
            "vllm:iteration_tokens_total", "Tokens computed in one step.", model_name, ITERATION_TOKEN_BUCKETS
        )
        self.registry.register(self._iteration_tokens)
        self._time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", TIME_TO_FIRST_TOKEN_BUCKETS
        )
        self._inter_token = WeightedHistogram(
            "vllm:inter_token_latency_seconds", "Time between two tokens of a request.", model_name, INTER_TOKEN_BUCKETS
        )
        self.registry.register(self._inter_token)
        self._time_per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time a token after the first, of finished requests.",
            INTER_TOKEN_BUCKETS,
        )
        latency = REQUEST_LATENCY_BUCKETS
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", latency)
        self._queue_time = self._histogram("vllm:request_queue_time_seconds", "Arrival to first step.", latency)
        self._inference_time = self._histogram("vllm:request_inference_time_seconds", "First step to end.", latency)
        self._prefill_time = self._histogram("vllm:request_prefill_time_seconds", "First step to first token.", latency)
        self._decode_time = self._histogram("vllm:request_decode_time_seconds", "First token to end.", latency)
        self._request_prompt = self._histogram("vllm:request_prompt_tokens", "Prompt tokens a request.", token_buckets)
        self._request_generation = self._histogram(
            "vllm:request_generation_tokens", "Generated tokens a request, all choices together.", token_buckets
        )
        self._request_longest = self._histogram(
            "vllm:request_max_num_generation_tokens", "Generated tokens of a request's longest choice.", token_buckets
        )
        self._params_n = self._histogram("vllm:request_params_n", "The parameter n.", NUM_CHOICES_BUCKETS)
        self._params_max_tokens = self._histogram(
            "vllm:request_params_max_tokens", "The parameter max_tokens.", token_buckets
        )
        self._request_preemptions = self._histogram(
            "vllm:request_num_preemptions", "Preemptions a request went through.", PREEMPTION_BUCKETS
        )

    # -- what the engine calls ----------------------------------------------------------------------------------------

    def set_config(self, plan: MemoryPlan, cache: CacheConfig) -> None:
        """The cache's settings, as labels of a gauge that is always 1."""
        labels = {field.name: str(getattr(cache, field.name)) for field in fields(cache)}
        labels |= {
            "model_name": self._model_name,
            "num_gpu_blocks": str(plan.num_device_blocks),
            "num_cpu_blocks": str(plan.num_host_blocks),
        }
        info = Gauge("vllm:cache_config_info", "Settings of the KV cache.", sorted(labels), registry=self.registry)
        info.labels(**labels).set(1)

    def record_step(self, stats: SchedulerStats | None, changed: Iterable[ObservedRequest], now: float) -> None:
        """Take in a step: the core's statistics, and the requests that got something."""
        try:
            if stats is not None:
                self._record_stats(stats)
            news = _StepNews()
            for request in changed:
                self._record_request(request, now, news)
            self._generation_tokens.inc(news.num_tokens)
            for interval, count in news.intervals.items():
                self._inter_token.observe(interval, count)
        except Exception as error:
            self._report(error)

    def record_death(self) -> None:
        """The core is gone: nothing runs any more."""
        for gauge in self._states.values():
            gauge.set(0)

    def render(self) -> tuple[bytes, str]:
        """The page and its content type.

        Always Prometheus' text format, which every scraper takes: prometheus-client writes an underscore for the colon
        of these names in OpenMetrics 1.0, and dashboards would find nothing.
        """
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4

    # -- inside -------------------------------------------------------------------------------------------------------

    def _record_stats(self, stats: SchedulerStats) -> None:
        last, self._last = self._last, stats
        for name, gauge in self._states.items():
            gauge.set(getattr(stats, name))
        for name, counter in self._totals.items():
            # Totals only grow; if one does not, a counter must not fall and nobody must suffer.
            counter.inc(max(getattr(stats, name) - getattr(last, name), 0))
        num_steps = stats.num_steps - last.num_steps
        num_tokens = stats.num_step_tokens - last.num_step_tokens
        if num_steps > 0 and num_tokens > 0:
            self._iteration_tokens.observe(num_tokens / num_steps, num_steps)

    def _record_request(self, request: ObservedRequest, now: float, news: _StepNews) -> None:
        if isinstance(request.error, QueueFullError):
            self._queue_full.inc()
        if request.is_finished and request.error is not None and request.metrics.first_token_time is None:
            return  # refused, aborted or failed before it was served anything
        num_tokens = request.num_output_tokens
        num_new = num_tokens - request.counted_tokens
        if not request.counted_prompt:
            request.counted_prompt = True
            self._prompt_tokens.inc(request.num_prompt_tokens)
            if request.metrics.first_token_time is not None:
                self._time_to_first_token.observe(request.metrics.first_token_time - request.metrics.arrival_time)
        elif num_new > 0 and request.counted_time is not None:
            # Most requests of a step were in the step before too, so most intervals are one and the same.
            interval = now - request.counted_time
            news.intervals[interval] = news.intervals.get(interval, 0) + 1
        if num_new > 0:
            request.counted_tokens, request.counted_time = num_tokens, now
            news.num_tokens += num_new
        if request.is_finished:
            self._record_finished(request)

    def _record_finished(self, request: ObservedRequest) -> None:
        life, params = request.metrics, request.params
        lengths = [len(choice.token_ids) for choice in request.choices]
        for choice in request.returned:
            self._success.labels(self._model_name, choice.finish_reason or "abort").inc()
        self._cached_tokens.inc(max(request.num_cached_tokens, 0))
        self._request_prompt.observe(request.num_prompt_tokens)
        self._request_generation.observe(sum(lengths))
        self._request_longest.observe(max(lengths, default=0))
        self._params_n.observe(params.n)
        if params.max_tokens is not None:
            self._params_max_tokens.observe(params.max_tokens)
        self._request_preemptions.observe(life.num_preemptions)
        end = life.finished_time
        if end is None:
            return
        self._e2e.observe(end - life.arrival_time)
        if life.first_scheduled_time is not None:
            self._queue_time.observe(life.first_scheduled_time - life.arrival_time)
            self._inference_time.observe(end - life.first_scheduled_time)
            if life.first_token_time is not None:
                self._prefill_time.observe(life.first_token_time - life.first_scheduled_time)
        if life.first_token_time is not None:
            self._decode_time.observe(end - life.first_token_time)
            longest = max(lengths, default=0)
            if longest > 1:
                self._time_per_token.observe((end - life.first_token_time) / (longest - 1))

    def _report(self, error: Exception) -> None:
        kind = f"{type(error).__name__}: {error}"
        if kind not in self._reported and len(self._reported) < 100:
            self._reported.add(kind)
            log.error("metrics could not be recorded (%s); requests are not affected", kind, exc_info=error)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self.registry).labels(self._model_name)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["model_name"], registry=self.registry).labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        family = Histogram(name, text, ["model_name"], registry=self.registry, buckets=tuple(buckets))
        return family.labels(self._model_name)


def _one_two_five(top: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `top`."""
    buckets, power = [], 1
    while power <= top:
        buckets += [factor * power for factor in (1, 2, 5) if factor * power <= top]
        power *= 10
    return tuple(buckets)
