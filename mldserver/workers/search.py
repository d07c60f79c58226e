"""The search for the records of a batch that end their process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from msgspec.structs import replace

from mldserver.handler.failure import Failure
from mldserver.runtime.failure_policy import FailurePolicy, OnFailure
from mldserver.runtime.interface import BatchOutcome, Delivery
from mldserver.runtime.plan import BatchPlan
from mldserver.workers.worker_process import WorkerGone

_ONCE: Final = FailurePolicy(attempts=1, on_failure=OnFailure.SKIP)
"""The policy of a search: each part is tried once, because the whole batch has had its attempts already."""
Send: TypeAlias = Callable[[Delivery], Awaitable[BatchOutcome]]


async def search_parts(
    delivery: Delivery, died: str, parts: list[BatchOutcome], *, once: Send, surely: Send
) -> None:
    """Process a batch by halving it, and add the outcomes of its parts to ``parts`` in order. ``died``: how it ended its process.

    Each death is a failed call of the batch's plan. These records fail for good; the others are processed. ``parts`` contains an
    outcome of the batch without a record. ``once`` sends a part to a process, and raises WorkerGone if that ends. ``surely``
    sends records that are not given to the handler.
    """
    outline = parts[0].outline
    fresh = range(outline.records - outline.duplicates) if delivery.part is None else delivery.part
    # It looks at none of the records: no age and no key makes a difference here.
    plan = BatchPlan(fresh, _ONCE, (), ())
    while (step := plan.step()) is not None:
        # Steps of halving never leave a record out.
        part = replace(delivery, part=range(step.indices[0], step.indices[-1] + 1))
        if not died:  # the whole has failed already
            try:
                parts.append(await once(part))
            except WorkerGone as gone:
                died = gone.died
        if died:
            plan.failed(step, Failure(died), 0)
            if len(step.indices) == 1:
                parts.append(await surely(replace(part, condemned=died)))
        died = ""
