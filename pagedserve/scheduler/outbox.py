"""EngineCoreOutputs in the making."""

from __future__ import annotations

from pagedserve.messages import EngineCoreOutputs, FinishedRequest
from pagedserve.scheduler.branching import Row
from pagedserve.scheduler.group import Group


class Outbox:
    """What happened since outputs were last taken."""

    def __init__(self) -> None:
        self.outputs = EngineCoreOutputs()

    def __bool__(self) -> bool:
        return bool(self.outputs.request_ids or self.outputs.finished)

    def add(self, request_id: str, row: Row) -> None:
        """One choice's news."""
        outputs = self.outputs
        if row.logprobs is not None:
            outputs.logprobs[len(outputs.request_ids)] = row.logprobs
        outputs.request_ids.append(request_id)
        outputs.choice_indices.append(row.choice_index)
        outputs.token_ids.append(row.token_ids)
        outputs.finish_reasons.append(row.finish_reason)
        outputs.stop_reasons.append(row.stop_reason)
        outputs.cumulative_logprobs.append(row.cumulative_logprob)

    def finish(self, group: Group, error_kind: str | None = None, error: str | None = None) -> None:
        """The last of a request."""
        self.outputs.finished.append(
            FinishedRequest(
                request_id=group.request_id,
                num_cached_tokens=group.num_cached_tokens,
                num_preemptions=group.num_preemptions,
                num_wasted_tokens=group.num_wasted_tokens,
                first_scheduled_time=group.first_scheduled_time,
                error_kind=error_kind,
                error=error,
            )
        )

    def take(self) -> EngineCoreOutputs:
        """Everything so far; the outbox is empty then."""
        taken, self.outputs = self.outputs, EngineCoreOutputs()
        return taken
