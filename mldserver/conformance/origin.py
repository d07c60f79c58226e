"""Where a case's behaviour stands: classes of KCL 3.1.3 unless another version is named, and APIs of AWS.

What was captured from the Java lies in ``tests/transcripts/``.
"""

from __future__ import annotations

from typing import Final

WRITER: Final = "MessageWriter"
READER: Final = "LineReaderTask, GetNextMessageTask"
PROTOCOL: Final = "MultiLangProtocol"
PROCESSOR: Final = "MultiLangShardRecordProcessor"
RECORD: Final = "JsonFriendlyRecord"
INITIALIZE: Final = "InitializeMessage"
BATCH: Final = "ProcessRecordsMessage"
CHECKPOINT: Final = "CheckpointMessage"
CHECKPOINTER: Final = "ShardRecordProcessorCheckpointer"
SENTINELS: Final = "SentinelCheckpoint"
ENDS: Final = "LeaseLostMessage, ShardEndedMessage, ShutdownRequestedMessage"
DRAIN: Final = "DrainChildSTDOUTTask"
KCL1: Final = "ShutdownMessage (KCL 1.x)"
OLD: Final = "CheckpointMessage, InitializeMessage (KCL before 1.7.1)"
KPL: Final = "UserRecord (KCL 1.x), KPL's aggregation format"
AGGREGATOR: Final = "AggregatorUtil"
DYNAMODB: Final = "DynamoDB Streams API: sequence numbers of 21 to 40 digits"
KINESIS: Final = "Kinesis API"
NEVER: Final = "MultiLangProtocol asks one at a time, in this order only: no daemon sends it"
MALFORMED: Final = "MessageWriter writes whole messages only: no daemon sends it"
FUTURE: Final = "no version writes it so; a later one, or another JSON library, may"
