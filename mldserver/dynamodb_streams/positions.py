"""Where reading a stream starts: ``trim_horizon``, ``latest``, a time, or a token; and where each shard starts then. Pure.

A token is readable JSON that names the last record read from every shard. It contains no iterators: they expire after
15 minutes.

When a pipeline begins for the first time, the operator chooses the position. ``latest`` and times are turned into a time
at once. The ledger stores that time as a position before every record, so that a crash does not change it. The server
makes it durable for all shards that it begins with before it delivers a record of them. Shards that appear later are
read from their oldest record: they are children of shards that were read, or new roots.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple, TypeAlias

import orjson

from mldserver.consumer.intake import KnownShard
from mldserver.dynamodb_streams.shard_tree import (
    LATEST,
    TRIM_HORIZON,
    After,
    At,
    Sentinel,
    ShardTree,
    Since,
    Start,
    StreamShard,
)
from mldserver.errors import ConfigError
from mldserver.records import Sequence

VERSION: Final = 1
"""The version of the tokens that this program writes. It reads no other version."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)
_NUMBERED: Final[dict[str, type[At | After]]] = {"AT_SEQUENCE_NUMBER": At, "AFTER_SEQUENCE_NUMBER": After}
_DIGITS: Final = re.compile("[0-9]{1,100}")
_ADVICE: Final = "Give trim_horizon, latest, a time with its offset (2026-11-22T18:00:00Z), or a token."


class ReadPosition(NamedTuple):
    """Where one shard was read up to."""

    id: str
    parent: str | None
    start: Sentinel | At | After | Since
    """Where to continue; never LATEST, which would mean a different place later."""
    effective_ms: int | None = None
    """Effective time of the last delivered record of the shard or its parent. Later records get at least this time."""


@dataclass(frozen=True, slots=True)
class Token:
    """Where a stream was read up to. ``parse_position`` reads ``str(token)``."""

    stream: str
    """The stream's ARN. A stream that is disabled and enabled again gets a new ARN."""
    shards: tuple[ReadPosition, ...]
    """The shards that are being read. Other shards are finished ancestors, wait for their parent, or are new."""
    since_ms: int | None = None
    """The time that reading began at, if it began at a time. Shards that appear later start at this time too."""

    def __str__(self) -> str:
        """Return the token as JSON, which ``parse_position`` reads.

        A shard's ``time`` is the time to start at for the iterator AT_TIMESTAMP, else its ``effective_ms``.
        """
        shards = []
        for shard in self.shards:
            entry: dict[str, Any] = {"id": shard.id, "parent": shard.parent}
            time_ms = shard.effective_ms
            match shard.start:
                case Since(ms):
                    time_ms = ms
                    entry |= {"iterator": "AT_TIMESTAMP"}
                case At(number):
                    entry |= {"iterator": "AT_SEQUENCE_NUMBER", "sequence_number": str(number)}
                case After(number):
                    entry |= {"iterator": "AFTER_SEQUENCE_NUMBER", "sequence_number": str(number)}
                case _:
                    assert shard.start is not LATEST, (
                        "LATEST cannot be saved: it would mean another place when read back"
                    )
                    entry |= {"iterator": "TRIM_HORIZON"}
            shards.append(entry | {"time": _text(time_ms)})
        since = _text(self.since_ms)
        token = {"version": VERSION, "stream": self.stream, "since": since, "shards": shards}
        return orjson.dumps(token, option=orjson.OPT_INDENT_2).decode()

    def require(self, arn: str) -> None:
        """Raise ConfigError when the token is of another stream than ``arn``."""
        if self.stream != arn:
            raise ConfigError(
                f"The token is of the stream {self.stream}, not of {arn}.",
                did="Nothing was moved.",
                advice="A stream that was disabled and enabled again is another one: begin it with trim_horizon. What is "
                "left of the old one can be read for 24 hours by its ARN.",
            )


Position: TypeAlias = Sentinel | Since | Token
"""``TRIM_HORIZON``, ``LATEST``, a time, or a token."""


def parse_position(position: object) -> Position:
    """Parse a position: ``trim_horizon`` or ``latest`` in any case, an aware datetime or its ISO text, a token or its JSON.

    A ``Position`` is returned unchanged. Raises ConfigError for any other value, also for a datetime without an offset.
    """
    match position:
        case Token() | Sentinel() | Since():
            return position
        case datetime():
            return _since(position)
        case str():
            text = position.strip()
            name = text.upper().replace("-", "_")
            if name in Sentinel.__members__:
                return Sentinel[name]
            if text.startswith("{"):
                return _parse_token(text)
            with contextlib.suppress(ValueError):
                return _since(datetime.fromisoformat(text))
            raise ConfigError(f"{text!r} is not a position in a stream.", advice=_ADVICE)
        case _:
            raise ConfigError(f"{position!r} is not a position in a stream.", advice=_ADVICE)


def _since(time: datetime) -> Since:
    if time.utcoffset() is None:
        raise ConfigError(
            f"The time {time.isoformat()} has no offset: it means another instant on every host.",
            advice="Give an aware time, such as datetime.now(UTC) or 2026-11-22T18:00:00Z.",
        )
    return Since((time - _EPOCH) // _MS)


def _parse_token(text: str) -> Token:
    """Return the token of a JSON text. Raises ConfigError if the token is malformed."""
    try:
        token = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise _damaged(f"it is no JSON ({error})") from None
    if (version := token.get("version")) != VERSION:
        raise _damaged(f"its version is {version!r}, this program reads {VERSION}")
    stream, shards = token.get("stream"), token.get("shards")
    if not isinstance(stream, str) or not isinstance(shards, list):
        raise _damaged("it needs a stream (an ARN) and a list of shards")
    if not shards:
        raise _damaged("it names no shard, so it says nothing of what was read")
    positions = tuple(map(_parse_shard, shards))
    if len({position.id for position in positions}) < len(positions):
        raise _damaged("it names a shard twice")
    return Token(stream, positions, _ms(token.get("since")))


def _parse_shard(entry: Any) -> ReadPosition:
    """Return the position of one entry of a token's ``shards``. Raises ConfigError if the entry is malformed."""
    if not isinstance(entry, dict) or not isinstance(entry.get("id"), str):
        raise _damaged(f"{entry!r} is no shard")
    shard_id, parent, time_ms = entry["id"], entry.get("parent"), _ms(entry.get("time"))
    if not isinstance(parent, str | None):
        raise _damaged(f"shard {shard_id} has the parent {parent!r}")
    match entry.get("iterator"):
        case "TRIM_HORIZON":
            return ReadPosition(shard_id, parent, TRIM_HORIZON, time_ms)
        case "AT_TIMESTAMP" if time_ms is not None:
            return ReadPosition(shard_id, parent, Since(time_ms))
        case ("AT_SEQUENCE_NUMBER" | "AFTER_SEQUENCE_NUMBER") as name:
            number = entry.get("sequence_number")
            if not isinstance(number, str) or not _DIGITS.fullmatch(number):
                raise _damaged(
                    f"shard {shard_id} has the sequence number {number!r}: it must be a text of digits"
                )
            return ReadPosition(shard_id, parent, _NUMBERED[name](int(number)), time_ms)
        case other:
            raise _damaged(f"shard {shard_id} has the iterator {other!r}, or lacks its time")


def _text(ms: int | None) -> str | None:
    """Return a time in milliseconds since the epoch as ISO text; None for None."""
    return None if ms is None else (_EPOCH + ms * _MS).isoformat(timespec="milliseconds")


def _ms(text: object) -> int | None:
    """Return a token's ISO time in milliseconds since the epoch; None for None. Raises ConfigError for any other value."""
    if text is None:
        return None
    try:
        return _since(datetime.fromisoformat(text)).ms  # type: ignore[arg-type]  # fromisoformat raises TypeError if it is not a text
    except (TypeError, ValueError, ConfigError):
        raise _damaged(f"{text!r} is not a time with an offset") from None


def _damaged(why: str) -> ConfigError:
    return ConfigError(
        f"The token cannot be read: {why}.",
        did="Nothing was moved.",
        advice="Give a token as Stream.token returned it, unchanged.",
    )


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a pipeline begins that has no positions yet."""

    everywhere: Start = TRIM_HORIZON
    """Where a shard begins that ``shards`` does not name."""
    shards: Mapping[str, Start] = field(default_factory=dict)
    """Where each shard of the token begins; empty without a token. Ancestors of these shards are not read."""
    token: Token | None = None

    @classmethod
    def of(cls, position: Position) -> Beginning:
        """Return the beginning that a position means for each shard."""
        if not isinstance(position, Token):
            return cls(position)
        new = TRIM_HORIZON if position.since_ms is None else Since(position.since_ms)
        return cls(new, {shard.id: shard.start for shard in position.shards}, position)

    def mark(self, tree: ShardTree) -> None:
        """Mark in the tree the shards in which reading begins: a token's shards; for ``latest`` the open shards.

        For ``latest``, closed shards count as finished.
        """
        tree.begin([StreamShard(shard.id, shard.parent) for shard in self.token.shards] if self.token else ())
        if self.everywhere is LATEST:
            for _, shard in tuple(tree.walk()):
                if shard.last is None:  # the shard is open
                    tree.begin([shard])
                else:
                    tree.finished(shard.id)

    def is_ahead(self, known: Mapping[str, KnownShard]) -> bool:
        """Return whether the pipeline has not read any record yet, by the ledger's shards ``known``.

        Then no shard has a position, except one that a server stored from the token before it crashed. ``ended`` proves
        nothing: opening a child marks its parent as ended, also if the parent was never read.
        """
        from_token = {shard_id: storable(start, 0) for shard_id, start in self.shards.items()}
        return all(shard.position in {None, from_token.get(name)} for name, shard in known.items())

    def start(self, shard_id: str, *, found_ms: int | None) -> Start:
        """Return where a shard begins that has no parent with a position.

        ``found_ms``: for a shard that appeared after the pipeline began, the time at which it began; else None. With
        ``latest``, such a shard is read from that time on.
        """
        start = self.shards.get(shard_id, self.everywhere)
        return Since(found_ms) if start is LATEST and found_ms is not None else start


def stored(position: Sequence) -> Start:
    """Return where to continue after a position of the ledger; ``storable`` is the inverse.

    The sequence number 0 stands for "no record yet": the sub-sequence is then a time in milliseconds.
    """
    return After(position.number) if position.number else Since(position.sub)


def storable(start: Start, now_ms: int) -> Sequence | None:
    """Return ``start`` as a position for the ledger; None for TRIM_HORIZON, where a shard without a position begins anyway.

    LATEST is stored as the time ``now_ms``.
    """
    match start:
        case After(number):
            return Sequence(number)
        case At(number):
            return Sequence(number - 1)
        case Since(ms):
            return Sequence(0, ms)
    return Sequence(0, now_ms) if start is LATEST else None


def inherited(parents: Iterable[str], known: Mapping[str, KnownShard]) -> Start:
    """Return where a shard without a position begins in a pipeline that has begun: at the oldest record, or at a time.

    If a parent's position is still the time that the pipeline began at, the parent had no record after that time. The
    shard may then have older records, so it begins at that time too. Without known parents, all shards are looked at:
    another server may be beginning right now.
    """
    relatives = [known[parent] for parent in parents if parent in known] or known.values()
    positions = [shard.position for shard in relatives if shard.position is not None]
    # A position with the sequence number 0 holds the time at which reading began: see ``stored``.
    begin_times = [position.sub for position in positions if not position.number]
    return Since(min(begin_times)) if begin_times else TRIM_HORIZON
