"""Every payload as it came, in hours of arrival time: an archive of the stream.

Shows windows without an event-time column: they are cut on the time at which the stream took the record.
"""

from mldserver import Record, tumbling

schema = "data BINARY NOT NULL, partition_key STRING, arrival TIMESTAMP"
windows = tumbling("1 hour")


def process_record(record: Record) -> tuple[bytes, str | None, object]:
    """Keep everything; nothing is decoded but base64."""
    return record.data, record.partition_key, record.approximate_arrival_timestamp
