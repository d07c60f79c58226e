"""Where reading a stream starts: ``trim_horizon``, ``latest``, a time, or a token; and what that is for a shard. Pure.

A token says where every shard was read up to, in JSON that people can read. It holds no iterator: those live for
15 minutes only.

Where the pipeline begins for the first time, the operator says where. ``latest`` and times become a time there and then.
The ledger keeps it as a position before every record, so that a crash does not change it. It is durable for all shards
that a server begins with before any record of them is handed over. Later, a shard is read from its oldest
record: it is a child of one that was read, or a root that is new.
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
"""Of tokens, as this program writes them; it reads no other."""

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
    """Where to go on; never LATEST, which means another place later."""
    effective_ms: int | None = None
    """Effective time of what was handed over last, here or in the parent: no later record counts as earlier."""


@dataclass(frozen=True, slots=True)
class Token:
    """Where a stream was read up to. ``str`` of it is what ``parse_position`` reads."""

    stream: str
    """The stream's ARN. A table whose stream is disabled and enabled again has another."""
    shards: tuple[ReadPosition, ...]
    """Those that are being read; all others are their ancestors, have yet to be, or are new."""
    since_ms: int | None = None
    """The time at which reading began, if it did at one: shards that turn up later count from there."""

    def __str__(self) -> str:
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
                    assert shard.start is not LATEST, "what is latest moves"
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
    """Return what a user gave: a name in any case, an aware datetime or its ISO text, a token or its JSON.

    A position that was parsed is one. Raises ConfigError for all else, a datetime without an offset among it.
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
    return None if ms is None else (_EPOCH + ms * _MS).isoformat(timespec="milliseconds")


def _ms(text: object) -> int | None:
    if text is None:
        return None
    try:
        return _since(datetime.fromisoformat(text)).ms  # type: ignore[arg-type]  # that it is none is what is asked
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
    """Where a pipeline begins that was never there."""

    everywhere: Start = TRIM_HORIZON
    shards: Mapping[str, Start] = field(default_factory=dict)
    """Of a token: so its shards, and none of their ancestors."""
    token: Token | None = None

    @classmethod
    def of(cls, position: Position) -> Beginning:
        """Begin at a position."""
        if not isinstance(position, Token):
            return cls(position)
        new = TRIM_HORIZON if position.since_ms is None else Since(position.since_ms)
        return cls(new, {shard.id: shard.start for shard in position.shards}, position)

    def mark(self, tree: ShardTree) -> None:
        """Note in the tree where reading begins: in a token's shards; for ``latest`` in all open ones."""
        tree.begin([StreamShard(shard.id, shard.parent) for shard in self.token.shards] if self.token else ())
        if self.everywhere is LATEST:
            for _, shard in tuple(tree.walk()):
                if shard.last is None:
                    tree.begin([shard])
                else:
                    tree.finished(shard.id)

    def is_ahead(self, known: Mapping[str, KnownShard]) -> bool:
        """Whether nothing was read yet: no shard has a position, except a token's places that were stored before a crash.

        That a shard has ended says nothing: where its child is opened, it has, unread.
        """
        places = {shard_id: storable(start, 0) for shard_id, start in self.shards.items()}
        return all(shard.position in {None, places.get(name)} for name, shard in known.items())

    def start(self, shard_id: str, *, found_ms: int | None) -> Start:
        """Return where a shard without a known parent begins.

        ``found_ms``: when the pipeline began, for a shard that appeared later: all that was created since is wanted.
        """
        start = self.shards.get(shard_id, self.everywhere)
        return Since(found_ms) if start is LATEST and found_ms is not None else start


def stored(position: Sequence) -> Start:
    """Return where to go on from the ledger's position."""
    return After(position.number) if position.number else Since(position.sub)


def storable(start: Start, now_ms: int) -> Sequence | None:
    """Return the position that keeps a beginning in the ledger; None: a shard without one begins there anyway."""
    match start:
        case After(number):
            return Sequence(number)
        case At(number):
            return Sequence(number - 1)
        case Since(ms):
            return Sequence(0, ms)
    return Sequence(0, now_ms) if start is LATEST else None


def inherited(parents: Iterable[str], known: Mapping[str, KnownShard]) -> Start:
    """Return where a shard without a position begins where others have one.

    Where the parent has had no record since a time, its child may have some from before. So may, where another server
    begins just now, a shard without a parent.
    """
    read = [known[parent] for parent in parents if parent in known]
    positions = [shard.position for shard in read or known.values() if shard.position is not None]
    return (
        Since(min(times)) if (times := [each.sub for each in positions if not each.number]) else TRIM_HORIZON
    )
