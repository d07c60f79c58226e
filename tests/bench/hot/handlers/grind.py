"""Thinks about each record for a while: what workers are for."""

import hashlib

from mldserver import Record

ROUNDS = 40


def process_record(record: Record) -> None:
    """Hash the data again and again, in steps too small to let go of the interpreter."""
    digest = record.data[:1024]
    for _ in range(ROUNDS):
        digest = hashlib.sha256(digest[:1024] * 4).digest()
