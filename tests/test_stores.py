"""The plain values of keyed state: where Kinesis places a key, and how a batch's changes travel."""

from __future__ import annotations

import pytest

from mldserver.effects import Effects
from mldserver.stores import (
    ALL_KEYS,
    KeyRange,
    StateChange,
    StoreSize,
    TimerEntry,
    hash_of,
    key_bytes,
    largest,
    nearly_full,
    pack_changes,
    pack_timer,
    unpack_changes,
    unpack_timer,
)

pytestmark = [pytest.mark.quick, pytest.mark.core]


def test_a_key_is_placed_by_md5_as_an_unsigned_number() -> None:
    # The digest of the empty text is the one that RFC 1321 lists.
    assert hash_of(key_bytes("")) == 0xD41D8CD98F00B204E9800998ECF8427E
    assert hash_of(key_bytes("é")) == hash_of(b"\xc3\xa9")


def test_keys_with_lone_surrogates_differ_from_the_text_that_escapes_them() -> None:
    assert key_bytes("\ud800") != key_bytes("\\ud800")


def test_a_range_contains_both_of_its_bounds() -> None:
    lower, upper = KeyRange(0, 9), KeyRange(10, ALL_KEYS.last)
    assert [number in lower for number in (0, 9, 10)] == [True, True, False]
    assert [number in upper for number in (9, 10, ALL_KEYS.last)] == [False, True, True]
    assert "9" not in lower


def test_changes_come_back_as_they_were_packed() -> None:
    changes = [
        StateChange(b"a", b"\x80", 17),
        StateChange(b"b", None),
        StateChange(b"\xed\xa0\x80", b"\x81", None),
    ]
    assert unpack_changes(pack_changes(changes)) == changes
    changes += [StateChange(b"a", b"\x93", 17, "alarm"), StateChange(b"a", None, None, "alarm/name")]
    assert unpack_changes(pack_changes(changes)) == changes


def test_a_timer_comes_back_as_it_was_packed() -> None:
    entry = TimerEntry(17, b"\xc7\x03\x011.5", attempt=2, number=2**40)
    assert unpack_timer(17, pack_timer(entry)) == entry


def test_changes_pass_between_processes_and_join_in_order_with_other_effects() -> None:
    first, second = (Effects(state=(pack_changes([StateChange(b"k", value)]),)) for value in (b"1", b"2"))
    assert Effects.unpacked(None, first.packed()) == first
    assert Effects.without_rows([first, second]).state == first.state + second.state
    assert first
    assert first.nbytes == len(first.state[0])


def test_of_many_stores_the_largest_are_named_and_the_others_counted() -> None:
    sizes = [StoreSize(f"s{number:02}", number, 10 * number) for number in range(25)]
    named = largest(sizes)
    assert [size.store_id for size in named] == [f"s{number:02}" for number in range(24, 4, -1)] + [""]
    assert named[-1] == StoreSize("", 10, 100)
    assert largest(named) == named
    assert largest([*named, StoreSize("", 1, 10**6)])[-1] == StoreSize("", 11, 10**6 + 100)
    assert largest([]) == ()


def test_state_is_nearly_full_from_nine_tenths_on() -> None:
    sizes = [StoreSize("a", 3, 60 * 2**20), StoreSize("b", 2, 30 * 2**20)]
    assert nearly_full(sizes, 101 * 2**20) is None
    assert nearly_full(sizes, 100 * 2**20) == (
        "keyed state takes 90 of 100 MiB (state_bytes), most of it in the store a with 3 keys: raise state_bytes, "
        "or let keys expire sooner with state_ttl"
    )
    assert nearly_full([], 1) is None
