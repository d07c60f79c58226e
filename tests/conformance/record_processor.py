"""A record processor of amazon_kclpy that does what can be done there: it checkpoints each batch, and retries at the end.

``mldserver conformance -- python3 tests/conformance/record_processor.py`` plays the catalogue at it.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from amazon_kclpy.kcl import CheckpointError, KCLProcess
from amazon_kclpy.v3 import processor

RETRIED = {"ThrottlingException", "KinesisClientLibDependencyException"}


class Processor(processor.RecordProcessorBase):
    def initialize(self, initialize_input: Any) -> None:
        self.gone = False

    def process_records(self, process_records_input: Any) -> None:
        records = process_records_input.records
        for record in records:
            if record.data is not None:
                record.binary_data  # noqa: B018  # read, as a handler would
        if records:
            last = records[-1]
            place = (last.sequence_number, last.sub_sequence_number)
            self._checkpoint(process_records_input.checkpointer, 5, *place)

    def shutdown_requested(self, shutdown_requested_input: Any) -> None:
        self._checkpoint(shutdown_requested_input.checkpointer, 5)

    def shard_ended(self, shard_ended_input: Any) -> None:
        if not self._checkpoint(shard_ended_input.checkpointer, 10, at_end=True):
            sys.exit(1)  # answered without its checkpoint, the shard's children would never begin

    def lease_lost(self, lease_lost_input: Any) -> None:
        pass

    def _checkpoint(self, checkpointer: Any, attempts: int, *place: Any, at_end: bool = False) -> bool:
        """Return whether it was stored, or will never be: the lease is gone."""
        for attempt in range(0 if self.gone else attempts):
            try:
                checkpointer.checkpoint(*place)
            except CheckpointError as error:
                if error.value == "ShutdownException":
                    self.gone = True
                    return True
                if error.value not in RETRIED and not at_end:
                    return False
                time.sleep(min(0.05 * 2**attempt, 1.0))
            else:
                return True
        return self.gone


if __name__ == "__main__":
    KCLProcess(Processor()).run()
