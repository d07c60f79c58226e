"""The same for version 1: dicts, and data that is still base64."""

# ruff: noqa: ANN001, ANN003, ANN201, ANN202, BLE001, PTH123  # written as users of amazon_kclpy write

import base64
import json
import os
import sys

from amazon_kclpy import kcl


class RecordProcessor(kcl.RecordProcessorBase):
    def _tell(self, **event):
        with open(os.environ["KCLPY_SAMPLE"], "a") as out:
            out.write(json.dumps({"shard": self._shard_id, **event}) + "\n")

    def initialize(self, shard_id):
        self._shard_id = shard_id
        self._unsaved = 0
        self._largest_seq = None
        self._tell(hook="initialize")

    def checkpoint(self, checkpointer, sequence_number=None):
        try:
            checkpointer.checkpoint(sequence_number)
            self._tell(checkpoint=sequence_number)
        except kcl.CheckpointError as e:
            sys.stderr.write(f"checkpoint: {e}\n")

    def process_records(self, records, checkpointer):
        try:
            for record in records:
                data = base64.b64decode(record.get("data"))
                seq = int(record.get("sequenceNumber"))
                self._tell(record=data.decode(), key=record.get("partitionKey"), sequence=seq)
                if self._largest_seq is None or seq > self._largest_seq:
                    self._largest_seq = seq
                self._unsaved += 1
            if self._unsaved >= 40:
                self.checkpoint(checkpointer, str(self._largest_seq))
                self._unsaved = 0
        except Exception as e:
            sys.stderr.write(f"Encountered an exception while processing records. Exception was {e}\n")

    def shutdown(self, checkpointer, reason):
        self._tell(hook="shutdown", reason=reason)
        if reason == "TERMINATE":
            self.checkpoint(checkpointer, None)


if __name__ == "__main__":
    kcl.KCLProcess(RecordProcessor()).run()
