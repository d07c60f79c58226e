"""What users of amazon_kclpy have: the sample application's shape, written anew from its documentation (version 3).

It writes down each record it processes and each checkpoint, as JSON lines, into the file that KCLPY_SAMPLE names.
"""

# ruff: noqa: ANN001, ANN003, ANN201, ANN202, ANN204, PTH123, TRY300  # written as users of amazon_kclpy write

import json
import os
import time

from amazon_kclpy import kcl
from amazon_kclpy.v3 import processor


class RecordProcessor(processor.RecordProcessorBase):
    """Checkpoints once it has processed so many records, and tries again when that is throttled."""

    SLEEP_SECONDS = 0.01
    CHECKPOINT_RETRIES = 5
    CHECKPOINT_EVERY = 40

    def __init__(self):
        self._shard_id = None
        self._largest_seq = (None, None)
        self._unsaved = 0

    def _tell(self, **event):
        with open(os.environ["KCLPY_SAMPLE"], "a") as out:
            out.write(json.dumps({"shard": self._shard_id, **event}) + "\n")

    def initialize(self, initialize_input):
        self._shard_id = initialize_input.shard_id
        self._tell(hook="initialize", start=initialize_input.sequence_number)

    def checkpoint(self, checkpointer, sequence_number=None, sub_sequence_number=None):
        for n in range(self.CHECKPOINT_RETRIES):
            try:
                checkpointer.checkpoint(sequence_number, sub_sequence_number)
                self._tell(checkpoint=sequence_number)
                return
            except kcl.CheckpointError as e:
                if e.value == "ShutdownException":
                    print("Encountered shutdown exception, skipping checkpoint")
                    return
                if e.value == "ThrottlingException":
                    if n == self.CHECKPOINT_RETRIES - 1:
                        print(f"Failed to checkpoint after {n} attempts, giving up.")
                        return
                elif e.value == "InvalidStateException":
                    print("MultiLangDaemon reported an invalid state while checkpointing.")
                else:
                    print(f"Encountered an error while checkpointing, error was {e}.")
            time.sleep(self.SLEEP_SECONDS)

    def process_record(self, data, partition_key, sequence_number, sub_sequence_number):
        self._tell(record=data.decode(), key=partition_key, sequence=sequence_number)

    def should_update_sequence(self, sequence_number, sub_sequence_number):
        return self._largest_seq == (None, None) or (sequence_number, sub_sequence_number) > self._largest_seq

    def process_records(self, process_records_input):
        for record in process_records_input.records:
            seq, sub_seq = int(record.sequence_number), record.sub_sequence_number
            self.process_record(record.binary_data, record.partition_key, seq, sub_seq)
            if self.should_update_sequence(seq, sub_seq):
                self._largest_seq = (seq, sub_seq)
            self._unsaved += 1
        if self._unsaved >= self.CHECKPOINT_EVERY:
            self.checkpoint(
                process_records_input.checkpointer, str(self._largest_seq[0]), self._largest_seq[1]
            )
            self._unsaved = 0

    def lease_lost(self, lease_lost_input):
        self._tell(hook="lease_lost")

    def shard_ended(self, shard_ended_input):
        self._tell(hook="shard_ended")
        self.checkpoint(shard_ended_input.checkpointer)

    def shutdown_requested(self, shutdown_requested_input):
        self._tell(hook="shutdown_requested")


if __name__ == "__main__":
    kcl.KCLProcess(RecordProcessor()).run()
