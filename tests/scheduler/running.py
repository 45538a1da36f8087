"""A scheduler with a fake worker of the same sizes, and what its requests should answer."""

from __future__ import annotations

from typing import Any

from pagedserve.sequence import Request
from tests.helpers.factories import make_scheduler
from tests.helpers.fake_executor import Collected, Driver, FakeExecutor


def make_driver(
    num_blocks: int = 64, num_host_blocks: int = 0, *, model: Any = None, looks_ahead: bool = False, **options: Any
) -> Driver:
    """Options are those of `make_scheduler`."""
    scheduler = make_scheduler(num_blocks, num_host_blocks, **options)
    executor = FakeExecutor(
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        block_size=options.get("block_size", 4),
        model=model,
        windows=options.get("windows", (None,)),
    )
    return Driver(
        scheduler,
        executor,
        max_tokens_per_step=options.get("max_num_batched_tokens"),
        looks_ahead=looks_ahead,
    )


def assert_right(driver: Driver, *requests: Request) -> None:
    """Each choice has the tokens that it has without cache, neighbours and preemption."""
    for request in requests:
        result = driver.results[request.request_id]
        assert result.finished is not None and result.finished.error is None
        for choice_index in range(request.sampling_params.num_sequences):
            assert result.token_ids[choice_index] == driver.executor.model.generate(request, choice_index)
            assert result.finish_reasons[choice_index] in ("stop", "length")


def answers(result: Collected) -> list[tuple[list[int], str, float]]:
    """What a client sees of each choice."""
    return [(result.token_ids[i], result.finish_reasons[i], result.scores[i]) for i in sorted(result.finish_reasons)]
