"""A record processor of amazon_kclpy that looks at each record's data, on the interpreter's standard streams."""

from __future__ import annotations

from typing import Any

from amazon_kclpy import kcl
from amazon_kclpy.v3 import processor


class Touching(processor.RecordProcessorBase):
    """Counts bytes."""

    seen = 0

    def initialize(self, initialize_input: Any) -> None:  # the interface
        """Nothing to do."""

    def process_records(self, process_records_input: Any) -> None:
        """Decode every record's data, which happens when it is asked for."""
        for record in process_records_input.records:
            self.seen += len(record.binary_data)

    def lease_lost(self, lease_lost_input: Any) -> None:  # see above
        """Nothing to do."""

    def shard_ended(self, shard_ended_input: Any) -> None:
        """Checkpoint the end, as everybody must."""
        shard_ended_input.checkpointer.checkpoint()

    def shutdown_requested(self, shutdown_requested_input: Any) -> None:  # see above
        """Nothing to do."""


if __name__ == "__main__":
    kcl.KCLProcess(Touching()).run()
