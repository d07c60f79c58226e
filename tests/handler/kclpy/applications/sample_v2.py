"""The same for version 2: one end for both reasons, and a last checkpoint when it is asked to stop."""

# ruff: noqa: ANN001, ANN003, ANN201, ANN202, PTH123, TRY300  # written as users of amazon_kclpy write

import json
import os

from amazon_kclpy import kcl
from amazon_kclpy.v2 import processor


class RecordProcessor(processor.RecordProcessorBase):
    def _tell(self, **event):
        with open(os.environ["KCLPY_SAMPLE"], "a") as out:
            out.write(json.dumps({"shard": self._shard_id, **event}) + "\n")

    def initialize(self, initialize_input):
        self._shard_id = initialize_input.shard_id
        self._unsaved = 0
        self._tell(hook="initialize", start=initialize_input.sequence_number)

    def checkpoint(self, checkpointer):
        for _ in range(3):
            try:
                checkpointer.checkpoint()
                self._tell(checkpoint=None)
                return
            except kcl.CheckpointError as e:
                if e.value != "ThrottlingException":
                    return

    def process_records(self, process_records_input):
        for record in process_records_input.records:
            self._tell(
                record=record.binary_data.decode(),
                key=record.get("partitionKey"),
                sequence=int(record.sequence_number),
            )
            self._unsaved += 1
        if self._unsaved >= 40:
            self.checkpoint(process_records_input.checkpointer)
            self._unsaved = 0

    def shutdown(self, shutdown_input):
        self._tell(hook="shutdown", reason=shutdown_input.reason)
        if shutdown_input.reason == "TERMINATE":
            self.checkpoint(shutdown_input.checkpointer)

    def shutdown_requested(self, shutdown_requested_input):
        self._tell(hook="shutdown_requested")
        self.checkpoint(shutdown_requested_input.checkpointer)


if __name__ == "__main__":
    kcl.KCLProcess(RecordProcessor()).run()
