"""From the setting ``dead_letters`` to the place itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from mldserver.deadletters.files import FOLDER
from mldserver.deadletters.folder import FolderDestination
from mldserver.errors import NotThereYet, OperatorError
from mldserver.output.store import OutputStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from mldserver.base.clock import Clock
    from mldserver.config import Settings
    from mldserver.coordinator.redrive_intake import Destination

__all__ = ["destination_of"]


def destination_of(
    settings: Settings, store: OutputStore, clock: Clock, jitter: Callable[[], float]
) -> Destination | None:
    """Return where dead letters go; None for the ledger. Blocking. Raises OperatorError for a URI that leads nowhere."""
    place = settings.dead_letters
    if place is None:
        return None
    if place.kind in {"jsonl", "parquet"}:
        kind: Literal["jsonl", "parquet"] = "jsonl" if place.kind == "jsonl" else "parquet"
        if not place.target:
            return FolderDestination(store, FOLDER, pipeline=settings.pipeline, kind=kind)
        try:
            other = OutputStore(place.target)
        except (OSError, ValueError, NotImplementedError) as error:
            raise (NotThereYet if isinstance(error, OSError) else OperatorError)(
                f"dead_letters = {place} cannot be reached: {error}.",
                advice="Check the URI: its name, and the options after the question mark.",
            ) from error
        # Another pipeline on the same stream, with files of the same names, may have the same place.
        return FolderDestination(other, settings.pipeline, pipeline=settings.pipeline, kind=kind)
    from mldserver.deadletters import aws_destinations  # noqa: PLC0415  # most servers never need AWS's client

    kinds: dict[
        str,
        type[
            aws_destinations.QueueDestination
            | aws_destinations.BucketDestination
            | aws_destinations.StreamDestination
        ],
    ] = {
        "sqs": aws_destinations.QueueDestination,
        "s3": aws_destinations.BucketDestination,
        "kinesis": aws_destinations.StreamDestination,
    }
    made: Destination = kinds[place.kind](
        place.target,
        pipeline=settings.pipeline,
        clock=clock,
        jitter=jitter,
        region=settings.region,
        endpoint_url=settings.endpoint_url,
    )
    return made
