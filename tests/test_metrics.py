from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from pagedserve.config import CacheConfig
from pagedserve.errors import EngineStepError, QueueFullError, RequestAbortedError
from pagedserve.messages import SchedulerStats
from pagedserve.metrics import EngineMetrics, WeightedHistogram
from pagedserve.outputs import CompletionOutput, RequestMetrics
from pagedserve.sampling_params import SamplingParams
from pagedserve.step import KVCacheSpec, MemoryPlan

SPEC = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32", bytes_per_block=2048)
PLAN = MemoryPlan(weights_bytes=1, kv_bytes=2, num_device_blocks=30, num_host_blocks=4, spec=SPEC)


@dataclass
class Observed:
    """A request as the metrics see it."""

    num_prompt_tokens: int = 5
    params: SamplingParams = field(default_factory=SamplingParams)
    choices: list[CompletionOutput] = field(default_factory=lambda: [CompletionOutput(index=0)])
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(arrival_time=10.0))
    is_finished: bool = False
    error: Exception | None = None
    num_cached_tokens: int = 0
    counted_prompt: bool = False
    counted_tokens: int = 0
    counted_time: float | None = None

    @property
    def num_output_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def returned(self) -> list[CompletionOutput]:
        return self.choices[: self.params.n]

    def grow(self, *token_ids: int) -> Observed:
        self.metrics.first_token_time = self.metrics.first_token_time or 11.0
        for choice in self.choices:
            choice.token_ids += token_ids
        return self

    def end(self, reason: str, now: float) -> Observed:
        self.is_finished = True
        self.metrics.first_scheduled_time = 10.5
        self.metrics.finished_time = now
        for choice in self.choices:
            choice.finish_reason = reason
        return self


def value(metrics: EngineMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"model_name": "m", **labels})


def test_a_request_is_counted_once_from_first_token_to_end() -> None:  # C083
    metrics = EngineMetrics("m")
    request = Observed(num_cached_tokens=3, params=SamplingParams(max_tokens=9))
    metrics.record_step(None, [request.grow(1)], 11.0)
    metrics.record_step(None, [request.grow(2, 3)], 11.5)
    metrics.record_step(None, [request.grow(4).end("stop", 12.0)], 12.0)
    assert value(metrics, "vllm:prompt_tokens_total") == 5
    assert value(metrics, "vllm:prompt_tokens_cached_total") == 3
    assert value(metrics, "vllm:generation_tokens_total") == 4
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(metrics, "vllm:time_to_first_token_seconds_sum") == 1.0
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 2
    assert value(metrics, "vllm:inter_token_latency_seconds_sum") == 1.0
    assert value(metrics, "vllm:e2e_request_latency_seconds_sum") == 2.0
    assert value(metrics, "vllm:request_queue_time_seconds_sum") == 0.5
    assert value(metrics, "vllm:request_prefill_time_seconds_sum") == 0.5
    assert value(metrics, "vllm:request_decode_time_seconds_sum") == 1.0
    assert value(metrics, "vllm:request_inference_time_seconds_sum") == 1.5
    assert value(metrics, "vllm:request_time_per_output_token_seconds_sum") == pytest.approx(1 / 3)
    assert value(metrics, "vllm:request_params_max_tokens_sum") == 9
    assert value(metrics, "vllm:request_generation_tokens_sum") == 4


def test_success_counts_choices_and_tokens_of_all_of_them() -> None:
    metrics = EngineMetrics("m")
    request = Observed(params=SamplingParams(n=3), choices=[CompletionOutput(index=i) for i in range(3)])
    metrics.record_step(None, [request.grow(1).end("length", 12.0)], 12.0)
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 3
    assert value(metrics, "vllm:generation_tokens_total") == 3
    assert value(metrics, "vllm:prompt_tokens_total") == 5
    assert value(metrics, "vllm:request_params_n_sum") == 3


def test_choices_that_were_computed_and_not_returned_are_no_successes() -> None:
    metrics = EngineMetrics("m")
    request = Observed(params=SamplingParams(n=1, best_of=3), choices=[CompletionOutput(index=i) for i in range(3)])
    metrics.record_step(None, [request.grow(1).end("length", 12.0)], 12.0)
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 1
    assert value(metrics, "vllm:generation_tokens_total") == 3


def test_a_prompt_that_is_only_scored_is_counted() -> None:
    metrics = EngineMetrics("m")
    metrics.record_step(None, [Observed().end("length", 12.0)], 12.0)
    assert value(metrics, "vllm:prompt_tokens_total") == 5
    assert value(metrics, "vllm:generation_tokens_total") == 0
    assert value(metrics, "vllm:time_to_first_token_seconds_count") == 0
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 1


@pytest.mark.parametrize("error", [EngineStepError("x"), RequestAbortedError("x"), QueueFullError("x", retry_after=1)])
def test_a_request_that_got_nothing_counts_for_nothing(error: Exception) -> None:
    metrics = EngineMetrics("m")
    request = Observed(error=error).end("error", 12.0)
    metrics.record_step(None, [request], 12.0)
    assert value(metrics, "vllm:prompt_tokens_total") == 0
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == 0
    rejections = value(metrics, "vllm:admission_rejections_total", reason="max_num_queued_reqs")
    assert rejections == (1 if isinstance(error, QueueFullError) else 0)


def test_totals_of_the_core_become_counters_and_never_fall() -> None:  # C112
    metrics = EngineMetrics("m")
    metrics.record_step(SchedulerStats(num_preemptions=3, num_wasted_tokens=40, prefix_cache_hits=16), [], 0.0)
    metrics.record_step(SchedulerStats(num_preemptions=5, num_wasted_tokens=10, prefix_cache_hits=-1), [], 0.0)
    assert value(metrics, "vllm:num_preemptions_total") == 5
    assert value(metrics, "pagedserve:wasted_tokens_total") == 40
    assert value(metrics, "vllm:prefix_cache_hits_total") == 16


def test_states_follow_the_core_and_end_with_it() -> None:
    metrics = EngineMetrics("m")
    metrics.record_step(SchedulerStats(num_running=4, num_waiting=2, kv_cache_usage=0.5), [], 0.0)
    assert value(metrics, "vllm:num_requests_running") == 4
    assert value(metrics, "vllm:num_requests_waiting") == 2
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.5
    metrics.record_death()
    assert value(metrics, "vllm:num_requests_running") == 0
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0


def test_each_step_is_one_observation_of_its_tokens() -> None:
    metrics = EngineMetrics("m")
    metrics.record_step(SchedulerStats(num_steps=1, num_step_tokens=7), [], 0.0)
    metrics.record_step(SchedulerStats(num_steps=1, num_step_tokens=7), [], 0.0)
    metrics.record_step(SchedulerStats(num_steps=3, num_step_tokens=27), [], 0.0)
    assert value(metrics, "vllm:iteration_tokens_total_count") == 3
    assert value(metrics, "vllm:iteration_tokens_total_sum") == 27
    assert value(metrics, "vllm:iteration_tokens_total_bucket", le="8.0") == 1


def test_many_observations_at_once_are_as_many_one_by_one() -> None:
    bounds = (0.1, 0.5, 1.0)
    values = {0.05: 3, 0.1: 2, 0.3: 1, 1.0: 4, 7.0: 5}
    ours = WeightedHistogram("latency", "x", "m", bounds)
    registry = CollectorRegistry()
    theirs = Histogram("latency", "x", ["model_name"], registry=registry, buckets=bounds).labels("m")
    for number, count in values.items():
        ours.observe(number, count)
        for _ in range(count):
            theirs.observe(number)
    own_registry = CollectorRegistry()
    own_registry.register(ours)
    disable_created_metrics()
    assert generate_latest(own_registry) == generate_latest(registry)


def test_a_mistake_in_the_metrics_is_logged_once_and_goes_no_further(monkeypatch: Any) -> None:  # C112
    metrics = EngineMetrics("m")
    logged: list[str] = []
    monkeypatch.setattr(logging.getLogger("pagedserve.metrics"), "error", lambda text, *args, **_: logged.append(text))
    broken: Any = object()
    for _ in range(3):
        metrics.record_step(None, [broken], 0.0)
    assert len(logged) == 1
    request = Observed().grow(1)
    metrics.record_step(None, [request], 11.0)
    assert value(metrics, "vllm:generation_tokens_total") == 1


def test_the_page_parses_and_label_values_are_escaped() -> None:  # C115
    name = 'a "quoted"\\ name\nof two lines'
    metrics = EngineMetrics(name)
    metrics.set_config(PLAN, CacheConfig())
    metrics.record_step(SchedulerStats(num_running=1), [Observed().grow(1)], 0.0)
    text, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    families = {family.name: family for family in parse_text(text.decode())}
    assert {sample.labels["model_name"] for f in families.values() for sample in f.samples} == {name}
    assert families["vllm:cache_config_info"].samples[0].labels["num_gpu_blocks"] == "30"


def test_the_page_does_not_grow_with_the_number_of_requests() -> None:  # C115
    metrics = EngineMetrics("m")

    def num_series() -> int:
        return sum(len(family.samples) for family in parse_text(metrics.render()[0].decode()))

    metrics.record_step(None, [Observed().grow(1).end("stop", 12.0)], 12.0)
    before = num_series()
    for _ in range(1000):
        metrics.record_step(None, [Observed().grow(1).end("stop", 12.0)], 12.0)
    assert num_series() == before
