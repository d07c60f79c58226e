"""What must come out of a world: every row in its window with its values, every revision whole, late rows where they go.

All of it follows from the stream's records, and from the moments at which the ledger took effect (``happened``). Nothing
of the server's code is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import orjson
import pyarrow.parquet as pq
from simulation.plan import DISK, Plan

from mldserver.ledger.contract import Flush
from mldserver.records import DeadLetter
from mldserver.testing import FakeStream
from mldserver.testing.fake_stream import StreamRecord

if TYPE_CHECKING:
    import pyarrow as pa
    from simulation.oracles import Positions

Key = tuple[str, tuple[int, int]]
"""A record: its shard and its place there, (sequence number, sub-sequence number). The firing of a timer: ``timer_key``."""
_TIMER = "timer "

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SIZE_MS = {"Arrival": 5000, "Slowly": 5000} | dict.fromkeys(
    ("Column", "Sliding", "Early", "EarlySliding", "Ordered"), 4000
)
"""Of the windows that have bounds (``handlers.py``)."""
EVERY_MS = 1000
"""How often a window of ``Sliding`` begins."""
SLACK_MS = 2000
"""Lateness and disorder of ``Column`` and ``Sliding``."""
AHEAD_MS = 5_000
"""How far a row may run ahead of its arrival, and count."""
QUIET_MS = 30_000
MAX_ROWS = 7
"""Of the windows that have none."""
ATTEMPTS = 3
"""Calls for a record, as often as it is delivered."""
RETENTION_MS = {"1 day": 86_400_000, "10 s": 10_000}


@dataclass(frozen=True, slots=True)
class Expected:
    """What is to become of a record."""

    record: StreamRecord
    n: int
    at_ms: int
    fails: int
    """How many calls fail first; -1: all."""
    none: bool
    """It gives no row."""
    effective_ms: int
    """The latest arrival time in its shard up to it, and not less than in its parents."""
    reset: bool = False
    """It deletes the state of its key."""
    put: int = 0
    """When it was put, ms."""
    timers: tuple[Mapping[str, Any], ...] = ()
    """What it does with timers (``support.timed.Act``)."""


@dataclass
class _Window:
    """What the ledger has of a window."""

    rows: list[Key] = field(default_factory=list)
    """In the order in which they were registered, but for those of the late dataset."""
    cuts: list[int] = field(default_factory=list)
    """How many of them each revision holds."""
    shown_ms: list[int] = field(default_factory=list)
    """When each revision was published."""
    attempt: int = 0
    """Which attempt was published last."""
    late: list[Key] = field(default_factory=list)
    bytes: int = 0
    """What their segments take, but for those of the late dataset."""

    def revision(self, number: int) -> Counter[Key]:
        """Return the rows of a revision, counted from 1."""
        return Counter(self.rows[: self.cuts[number - 1]])


@dataclass
class Outputs:
    """What servers write, register, cut and publish, against what they may."""

    plan: Plan
    stream: FakeStream
    out: Path
    positions: Positions
    """What was delivered, and where to tell what is broken."""
    written: dict[str, list[Key]] = field(default_factory=dict)
    """The rows of each segment."""
    windows: dict[str, _Window] = field(default_factory=dict)
    rows: set[Key] = field(default_factory=set)
    """Records whose rows are registered."""
    letters_ever: set[Key] = field(default_factory=set)
    """Records that were a dead letter at some time."""
    late: int = 0
    """How many rows came after their window was cut, but for dead letters that ran again."""
    revisions: int = 0
    """How many were cut for them."""
    early_seen: dict[Path, None] = field(default_factory=dict)
    """Files of early results that were looked at."""
    fired_ms: Collection[int] = ()
    """The due times of timers that were called: the times of later rows are not less."""

    def _tell(self, text: str) -> None:
        self.positions.broken.append(text)

    def wrote(self, path: str, rows: pa.Table) -> None:
        """A segment is being written."""
        self.written[path] = list(_keys(rows))

    def happened(self, call: str, argument: Any, now_ms: int) -> None:
        """A transaction of the ledger took effect."""
        if self.plan.early:
            self._look_early()
        if call == "register":
            self._registered(argument, now_ms)
        elif call == "cut":
            self._cut(argument, now_ms)
        elif call == "published":
            self._published(argument, now_ms)

    def _registered(self, flush: Flush, now_ms: int) -> None:
        self.letters_ever |= {key_of(letter) for letter in flush.effects.dead_letters}
        held = self._held_ahead(now_ms)
        for segment in flush.segments:
            name = segment.window_id
            windows = [self.windows.setdefault(each, _Window()) for each in self._with(name)]
            window, rows, cut = windows[0], self.written[segment.path], any(each.cuts for each in windows)
            if len(rows) != segment.rows:
                self._tell(f"{name}: {segment.rows} rows are registered, {len(rows)} were written")
            if str(segment.kind) != "window":
                self.late += len({row for row in rows if not is_timer(row)} - self.letters_ever)
            if again := self.rows.intersection(rows):
                self._tell(f"{name}: rows are registered twice: {_some(Counter(again))}")
            self.rows.update(rows)
            if str(segment.kind) == "late":
                if self._is_behind_a_cut(name):
                    pass
                elif cut or not self.plan.on_column:
                    self._may_be_late(name, windows, now_ms)
                else:
                    self._may_be_left_out(name, rows, held)
                window.late += rows
                continue
            if (str(segment.kind) == "recompute") is not cut:
                self._tell(f"{name}: {segment.kind} rows after {[len(each.cuts) for each in windows]} cuts")
            if not cut and self._is_ahead(name, now_ms) and self._is_full(held):
                self._tell(f"{name}: rows of a far window are kept beside {held}")
            for each in windows:
                each.rows += rows
            window.bytes += segment.bytes

    def _look_early(self) -> None:
        """Early results are of windows that show no other, and hold rows that are registered for them."""
        for folder in self.out.glob("_early/window=*"):
            name = folder.name.removeprefix("window=")
            if (self.out / folder.name).exists():
                self._tell(f"{name}: it is shown twice, early and late")
            files = dict.fromkeys(folder.glob("*.parquet"))
            if files.keys() <= self.early_seen.keys():
                continue
            self.early_seen |= files
            rows = Counter(key for file in files for key in _keys(pq.ParquetFile(file).read(_PLACE)))
            if more := rows - Counter(self.windows[name].rows):
                self._tell(f"{name}: its early result has {_some(more)} too many")

    def _is_behind_a_cut(self, name: str) -> bool:
        """Whether windows are computed in order, and a later one than this was cut."""
        later = (window for other, window in self.windows.items() if other > name)
        return self.plan.handler == "Ordered" and any(window.cuts for window in later)

    def _with(self, name: str) -> list[str]:
        """Return the windows that have the rows of a segment, which names the last of them: that one in front."""
        if not self.plan.slides:
            return [name]
        last_ms = _starts_ms(name)
        return [_window_at(ms) for ms in range(last_ms, last_ms - SIZE_MS["Sliding"], -EVERY_MS)]

    def _is_ahead(self, name: str, now_ms: int) -> bool:
        """Whether a window begins further ahead than a row may run ahead of its arrival."""
        return self.plan.on_column and _starts_ms(name) > now_ms + AHEAD_MS

    def _held_ahead(self, now_ms: int) -> tuple[int, int]:
        """Return how many windows that are ahead are open, and what they take."""
        if not self.plan.on_column:
            return 0, 0
        ahead = [
            window
            for name, window in self.windows.items()
            if window.rows and not window.cuts and self._is_ahead(name, now_ms)
        ]
        return len(ahead), sum(window.bytes for window in ahead)

    def _is_full(self, held: tuple[int, int]) -> bool:
        """Whether nothing more may be kept of windows that are ahead, as far as can be told from outside."""
        known = self.plan.servers == 1 and (self.plan.form.name != "V1" or not self.plan.clocks_differ)
        return known and held[1] >= self.plan.disk_bytes // 10

    def _may_be_left_out(self, name: str, rows: Iterable[Key], held: tuple[int, int]) -> None:
        """Rows go to the late dataset though their window was never cut where they are ahead and there are too many."""
        if self.plan.form.name == "V1":
            return  # it does not tell when its records arrived
        for shard, (number, sub) in (row for row in rows if not is_timer(row)):
            record = next(each for each in self.stream.shards[shard].records if each.order == (number, sub))
            ahead_ms = orjson.loads(record.data or b"")["at"] - record.arrival_ms
            if ahead_ms <= AHEAD_MS:
                self._tell(f"{name}: late rows, and it was never cut; {ahead_ms} ms ahead")
        # What was near when it was kept, or is by the arrivals that the server knows, may count too.
        if not sum(window.bytes for window in self.windows.values()) >= self.plan.disk_bytes // 10:
            self._tell(f"{name}: rows of a far window are left out beside {held}")

    def _may_be_late(self, name: str, windows: Sequence[_Window], now_ms: int) -> None:
        """Rows go to the late dataset when a window of theirs is cut and, where it would be computed again, not retained."""
        cut = [window for window in windows if window.cuts]
        if not cut or self.plan.handler == "Runs":
            self._tell(f"{name}: late rows, and it was never cut")
        # Where segments may take little, windows are not retained for as long.
        if self.plan.late == "recompute" and self.plan.disk_bytes == DISK:
            keep_ms = RETENTION_MS[self.plan.retention]
            shown = [window for window in cut if len(window.shown_ms) == len(window.cuts)]
            if all(window.shown_ms[-1] + keep_ms > now_ms for window in shown):
                self._tell(f"{name}: late rows beside a window that is retained")

    def _cut(self, names: Iterable[str], now_ms: int) -> None:
        for name in names:
            window = self.windows.get(name, _Window())
            again = len(window.shown_ms) == len(window.cuts) and window.cuts[-1:] != [len(window.rows)]
            if again and window.rows:
                self._may_close(name, window, now_ms)
                self.revisions += bool(window.cuts)
                window.cuts.append(len(window.rows))

    def _may_close(self, name: str, window: _Window, now_ms: int) -> None:
        """A window closes once its time has come by AWS's clock, when the stream is quiet, and when it is over.

        It is quiet when no rows come. Records without a row do not keep windows open, nor do rows too far ahead of their arrival.
        """
        receipts = self.plan.form.name == "V1" and self.plan.clocks_differ
        if window.cuts or self.plan.handler == "Runs" or receipts:
            return
        if self.plan.outage and any(shard.closed for shard in self.stream.shards.values()):
            return  # once every shard has ended or was left out for too long, the stream counts as over
        due_ms = _starts_ms(name) + SIZE_MS[self.plan.handler]
        due_ms += SLACK_MS if self.plan.on_column else 0
        letters = {(shard, number) for shard, (number, _) in self.letters_ever}
        times = self.positions.delivered_ms
        last_ms = next((times[key] for key in reversed(times) if key not in letters and self._counts(key)), 0)
        quiet = self.plan.on_column and now_ms - last_ms >= QUIET_MS
        over = all(self.stream.shards[shard].closed for shard in self.positions.delivered)
        if now_ms < due_ms and not quiet and not over:
            self._tell(f"{name}: it is cut {due_ms - now_ms} ms before its time")

    def _counts(self, key: tuple[str, int]) -> bool:
        """Whether a record has a row that shows the shard's time for certain."""
        shard, number = key
        records = (each for each in self.stream.shards[shard].records if each.order[0] == number)
        told = ((each.arrival_ms, orjson.loads(each.data or b"")) for each in records)
        return any(not each["none"] and each["at"] - arrival_ms <= AHEAD_MS for arrival_ms, each in told)

    def _published(self, attempts: Mapping[str, int], now_ms: int) -> None:
        for name, attempt in attempts.items():
            window = self.windows[name]
            if attempt <= window.attempt:
                continue  # told once more, perhaps when the next revision was on its way
            window.attempt = attempt
            window.shown_ms.append(now_ms)
            files = sorted(self.out.glob(f"window={name}/*.parquet"))
            seen = Counter(
                key for file in files for key in _keys(pq.ParquetFile(file).read([*_PLACE, *_FIRED]))
            )
            if len(window.shown_ms) != len(window.cuts) or seen != window.revision(len(window.cuts)):
                self._tell(f"{name}: what readers see is not revision {len(window.cuts)}")

    # The end.

    def expected(self) -> dict[Key, Expected]:
        """Say of every record of the stream what it is."""
        found: dict[Key, Expected] = {}
        for shard_id, times in _effective(self.stream).items():
            for record, ms in zip(self.stream.shards[shard_id].records, times, strict=True):
                told = orjson.loads(record.data or b"")
                del told["slow"]
                told["at_ms"] = told.pop("at")
                found[shard_id, record.order] = Expected(record, effective_ms=ms, **told)
        return found

    def check(self, letters: Iterable[DeadLetter], purged: Counter[Key]) -> list[str]:
        """Compare all that came out with the stream; return what is wrong."""
        expected, stored = self.expected(), [each for each in letters if not is_timer(key_of(each))]
        everything = list(self.visible())
        rows = [each for each in everything if not is_timer(_key(each[2])) and self._is_last(*each)]
        purged = Counter({key: count for key, count in purged.items() if not is_timer(key)})
        counts = Counter(_key(row) for _, _, row in rows), Counter(map(key_of, stored)) + purged
        broken = [
            f"{key}: {counts[0][key]} rows, {counts[1][key]} dead letters of {expected.get(key, 'no record')}"
            for key in sorted({*expected, *counts[0], *counts[1]})
            if key not in expected or (counts[0][key], counts[1][key]) not in self._fates(expected[key])
        ]
        broken += [
            f"{key_of(letter)}: its dead letter holds something else"
            for letter in stored
            if not self._is_whole(letter, expected[key_of(letter)].record)
        ]
        for name, late, row in rows:
            told = expected.get(_key(row))
            if told is not None and (wrong := self._wrong(told, name, row)):
                broken.append(f"{_key(row)} in {'_late/' * late}{name}: {', '.join(wrong)}")
        broken += self._complete(everything)
        if self.plan.handler == "Ordered":
            broken += _totals(everything)
        broken += _ordered(self.stream, [row for _, _, row in rows if _key(row) not in self.letters_ever])
        if self.plan.parks:
            broken += _no_overtaking(expected, [row for _, _, row in rows], set(map(key_of, stored)))
        if self.plan.servers == 1 and not broken:
            broken += _one_clock([row for name, late, row in everything if self._is_last(name, late, row)])
        return broken

    def _fates(self, told: Expected) -> set[tuple[int, int]]:
        """Say how many rows and dead letters a record may come to."""
        row, letter, nothing = (1, 0), (0, 1), (0, 0)
        gone = {"dead_letter": letter, "skip": nothing, "halt": row}[self.plan.on_failure]
        if told.fails < 0:
            return {gone}
        made = nothing if told.none else row
        # What fails more often than it is tried fails for good, unless it comes again: after a crash, or redriven.
        fails = {made, gone} if told.fails >= ATTEMPTS else {made}
        return fails | {letter} if self.plan.parks else fails

    def _is_whole(self, letter: DeadLetter, record: StreamRecord) -> bool:
        arrival_ms = None if self.plan.form.name == "V1" else record.arrival_ms
        told = (letter.data, letter.partition_key, letter.arrival_ms)
        return told == (record.data, record.partition_key, arrival_ms)

    def visible(self) -> Iterator[tuple[str, bool, dict[str, Any]]]:
        """Yield the window of every visible row, whether it is in the late dataset, and the row."""
        for late in (False, True):
            for folder in sorted((self.out / "_late" if late else self.out).glob("window=*")):
                for file in sorted(folder.glob("*.parquet")):
                    for row in pq.ParquetFile(file).read().to_pylist():
                        yield folder.name.removeprefix("window="), late, row

    def _wrong(self, told: Expected, name: str, row: dict[str, Any]) -> list[str]:
        """Name the columns that are not what the record says, and the window."""
        arrival_ms = told.record.arrival_ms
        v1 = self.plan.form.name == "V1"
        wants = {"n": told.n, "at": told.at_ms, "_arrival": None if v1 else arrival_ms}
        wrong = [
            f"{column} is {row[column]}, not {want}"
            for column, want in wants.items()
            if _ms(row[column]) != want
        ]
        # In V1 no arrival times are told: receipt is what counts. A dead letter that runs again knows its own only, or
        # when it, or one that runs with it, has failed.
        again = _key(row) in self.letters_ever
        earliest = arrival_ms if v1 or again else told.effective_ms
        unknown = v1 and (again or self.plan.clocks_differ)
        late = row["_time"] > told.effective_ms and row["_time"] not in self.fired_ms
        if (row["_time"] < earliest and not unknown) or (late and not v1):
            wrong.append(f"_time is {row['_time']}, not {earliest} to {told.effective_ms}")
        return wrong + self.wrong_window(name, row, told.at_ms)

    def wrong_window(self, name: str, row: dict[str, Any], at_ms: int) -> list[str]:
        """Name the window of a row whose event time is ``at_ms``, unless it is there."""
        if self.plan.handler == "Runs":
            return []
        ms = at_ms if self.plan.on_column else row["_time"]
        home = self._last_window(ms)
        return [f"it belongs to {home}"] if home != name else []

    def _last_window(self, ms: int) -> str:
        """Return the last window that has a row with this event time."""
        every_ms = EVERY_MS if self.plan.slides else SIZE_MS[self.plan.handler]
        return _window_at(ms // every_ms * every_ms)

    def _is_last(self, name: str, late: bool, row: dict[str, Any]) -> bool:
        """Whether it is the last window that shows a row; ``_complete`` looks at the others."""
        return late or not self.plan.slides or self._last_window(_ms(row["at"])) == name

    def _complete(self, rows: list[tuple[str, bool, dict[str, Any]]]) -> list[str]:
        """Each window's last revision, and its late dataset, hold all that was registered for them."""
        broken = []
        shown: dict[tuple[str, bool], Counter[Key]] = {}
        for name, late, row in rows:
            shown.setdefault((name, late), Counter())[_key(row)] += 1
        wanted = {(name, False): Counter(window.rows) for name, window in self.windows.items() if window.rows}
        wanted |= {(name, True): Counter(window.late) for name, window in self.windows.items() if window.late}
        for place in sorted(shown.keys() | wanted):
            have, want = shown.get(place, Counter()), wanted.get(place, Counter())
            if have != want:
                broken.append(f"{place}: {_some(want - have)} are missing, {_some(have - want)} too many")
        if self.plan.handler == "Runs":
            most = MAX_ROWS * self.plan.servers  # each server keeps the bound for its own rows
            crowded = [name for name, window in self.windows.items() if len(window.rows) > most]
            broken += [f"{name} has more than {most} rows" for name in crowded]
        return broken


def _totals(rows: Iterable[tuple[str, bool, dict[str, Any]]]) -> list[str]:
    """Each window's total is the number of rows in it and in all windows before it."""
    shown = sorted((name, row["total"]) for name, late, row in rows if not late)
    counts = Counter(name for name, _ in shown)
    wanted = {name: sum(counts[each] for each in counts if each <= name) for name in counts}
    return [
        f"{name}: its total is {total}, not {wanted[name]}" for name, total in shown if total != wanted[name]
    ]


_PLACE = ["_shard", "_sequence", "_sub_sequence"]
_FIRED = ["key", "timer", "n", "link"]
"""Columns of firings, in a pipeline with timers."""


def _keys(rows: pa.Table) -> Iterator[Key]:
    names = [*_PLACE, *_FIRED] if "timer" in rows.column_names else _PLACE
    yield from map(_key, rows.select(names).to_pylist())


def _key(row: dict[str, Any]) -> Key:
    if row.get("timer") is not None:
        return timer_key(row["key"], row["timer"], row["n"], row["link"])
    return row["_shard"], (int(row["_sequence"]), row["_sub_sequence"])


def timer_key(key: str, timer: str, n: int, link: int) -> Key:
    """Return the key of a firing: of a timer that record ``n`` has set, and its callback again ``link`` times."""
    return f"{_TIMER}{key} {timer}", (n, link)


def is_timer(key: Key) -> bool:
    """Whether something is the firing of a timer."""
    return key[0].startswith(_TIMER)


def key_of(letter: DeadLetter) -> Key:
    """Return which record, or firing, a dead letter is."""
    if timer := getattr(letter, "timer", None):
        told = msgspec.msgpack.decode(letter.data or b"")
        return timer_key(letter.partition_key or "", timer, told["n"], told["link"])
    return letter.shard_id, (letter.sequence.number, letter.sequence.sub)


def _ms(value: Any) -> Any:
    """Return a time of a column as milliseconds, anything else as it is."""
    if not isinstance(value, datetime):
        return value
    return (value.replace(tzinfo=value.tzinfo or UTC) - EPOCH) // timedelta(milliseconds=1)


def _window_at(start_ms: int) -> str:
    return (EPOCH + timedelta(milliseconds=start_ms)).strftime("%Y-%m-%dT%H-%M-%SZ")


def _starts_ms(name: str) -> int:
    start = datetime.strptime(name, "%Y-%m-%dT%H-%M-%SZ").replace(tzinfo=UTC)
    return (start - EPOCH) // timedelta(milliseconds=1)


def _effective(stream: FakeStream) -> dict[str, list[int]]:
    """Return each record's effective time, by shard; parents stand before their children."""
    times: dict[str, list[int]] = {}
    ends: dict[str, int] = {}
    for shard in stream.shards.values():
        latest = max((ends[parent] for parent in shard.parents), default=0)
        times[shard.id] = []
        for record in shard.records:
            latest = max(latest, record.arrival_ms)
            times[shard.id].append(latest)
        ends[shard.id] = latest
    return times


def _ordered(stream: FakeStream, rows: list[dict[str, Any]]) -> list[str]:
    """By (_time, _clock) each shard's rows stand in its order, and children behind their parents."""
    broken = []
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    before: dict[str, tuple[int, int]] = {}
    rows = sorted(rows, key=lambda row: (row["_time"], row["_clock"]))
    for place, (shard, number) in enumerate(map(_key, rows)):
        if number < before.get(shard, number):
            broken.append(f"{shard}: {number} comes after {before[shard]}")
        before[shard] = number
        first.setdefault(shard, place)
        last[shard] = place
    for child in stream.shards.values():
        broken += [
            f"{child.id} begins before its parent {parent} is over"
            for parent in child.parents
            if child.id in first and parent in last and first[child.id] < last[parent]
        ]
    return broken


def _no_overtaking(expected: dict[Key, Expected], rows: list[dict[str, Any]], letters: set[Key]) -> list[str]:
    """Of a partition key, no row comes before that of an earlier record, or while an earlier one is a dead letter."""
    clocks = {_key(row): row["_clock"] for row in rows}
    waits: dict[tuple[str, str | None], Key] = {}
    latest: dict[tuple[str, str | None], int] = {}
    broken = []
    for key, told in expected.items():
        place = key[0], told.record.partition_key
        if key in letters:
            waits.setdefault(place, key)
        elif key in clocks:
            if place in waits or clocks[key] < latest.get(place, 0):
                broken.append(f"{key} of {place} has overtaken {waits.get(place, 'an earlier one')}")
            latest[place] = clocks[key]
    return broken


def _one_clock(rows: list[dict[str, Any]]) -> list[str]:
    """With one server the order is a total one, and runs of rows follow each other in it."""
    ties = Counter(row["_clock"] for row in rows)
    ties -= Counter(set(ties))
    return [f"clock values are shared by several rows: {_some(ties)}"] if ties else []


def _some(counted: Counter[Any]) -> str:
    return ", ".join(map(str, sorted(counted)[:3])) or "none"
