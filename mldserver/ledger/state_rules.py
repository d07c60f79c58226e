"""Rules of keyed state over a draft: which shard has which store, and which store needs which file. They mean what ``Ledger`` says.

The state itself is in files. A flush writes one file for all stores that it changes. The ledger names the files, and for each
file the stores that need it, each with the ranges of hashes for which it does. When a shard splits or shards merge, no row is
copied: the parts of the parents' ranges that lie in the child's range become the child's, file by file.

A key's latest row is the one with the highest serial among the files that its store needs. That holds because a store's serial
rises with each flush, a child's store begins above its parents', and a child's opening closes the parents' stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from mldserver.errors import InternalError, PeerError
from mldserver.ledger.book import Book, Draft
from mldserver.ledger.contract import (
    Flush,
    LedgerState,
    ShardState,
    StateFile,
    StoreState,
    with_ancestors,
)
from mldserver.stores import KeyRange, StoreClaim, divide


def shards_with_state(held: Book | LedgerState) -> frozenset[str]:
    """Return the shards whose store has state, or has passed it on to children."""
    needed = _needed(held)
    return frozenset(
        shard_id
        for shard_id, shard in held.shards.items()
        if shard.store in needed or (shard.store and held.stores[shard.store].closed)
    )


def _needed(held: Book | LedgerState) -> set[str]:
    """Return the stores that need a file."""
    return {store_id for file in held.state_files.values() for store_id in file.needed}


# Opening.


def open_store(draft: Draft, shard: ShardState, claim: StoreClaim) -> str:
    """Return the id of a shard's store, creating the store when it is new. Raises PeerError for another range than it has."""
    if claim.key_range is None:
        return _of_family(draft, shard)
    store = draft.stores.get(shard.shard_id)
    if store is None:
        _take_over(draft, shard, claim.key_range)
    elif store.key_range != claim.key_range:
        raise PeerError(
            f"The stream gives shard {shard.shard_id} another range of keys than it had when its keyed state was stored.",
            did="The shard was not opened.",
            advice="It is a shard of another stream with the same name. Give that stream another pipeline, or forget the state "
            "with `mldserver ledger reset --forget-state`.",
            shard=shard.shard_id,
        )
    return shard.shard_id


def _of_family(draft: Draft, shard: ShardState) -> str:
    """Return the store of the shard or of its parent. Without either, the shard is the root of a family and has a new store."""
    parents = (draft.shards.get(parent) for parent in shard.parents)
    known = [each.store for each in (shard, *parents) if each is not None and each.store]
    if known:
        store, others = draft.stores.get(known[0]), _shards_of(draft, known[0])
        if store is not None and store.next_due_ms is not None and all(each.ended for each in others):
            # A server may have adopted it: that server's flushes are refused from now on.
            draft.stores.put(store.store_id, replace(store, serial=store.serial + 1))
        return known[0]
    draft.stores.put(shard.shard_id, StoreState(shard.shard_id))
    return shard.shard_id


def _shards_of(draft: Draft, store_id: str) -> list[ShardState]:
    return [shard for shard in draft.book.shards.values() if shard.store == store_id]


def _take_over(draft: Draft, shard: ShardState, key_range: KeyRange) -> None:
    """Begin a store with what the stores above it hold of its range, and close those."""
    parents = {store.store_id: store for store in _stores_above(draft, shard, key_range)}
    serial = max((store.serial + 1 for store in parents.values()), default=0)
    dues = (store.next_due_ms for store in parents.values() if store.next_due_ms is not None)
    begun = StoreState(shard.shard_id, serial, *key_range, next_due_ms=min(dues, default=None))
    draft.stores.put(shard.shard_id, begun)
    for store in parents.values():
        draft.stores.put(store.store_id, replace(store, closed=True))
    for path in draft.book.needed_files if parents else ():
        file = draft.book.state_files[path]
        needed, taken = dict(file.needed), tuple[KeyRange, ...]()
        for store_id in parents.keys() & needed.keys():
            inside, outside = divide(needed.pop(store_id), key_range)
            taken += inside
            if outside:
                needed[store_id] = outside
        if taken:
            draft.state_files.put(path, replace(file, needed=needed | {shard.shard_id: tuple(sorted(taken))}))


def _stores_above(draft: Draft, shard: ShardState, key_range: KeyRange) -> Iterator[StoreState]:
    """Yield the stores of a shard's parents. If a parent has none, yield each store that shares hashes with the shard.

    Such a parent was never opened: its records had expired, say. Its own parents may not be known, so that only the range shows
    whose state it would have taken over. Stores of the shard's descendants do not count.
    """
    stores = {parent: draft.stores.get(parent) for parent in shard.parents}
    yield from filter(None, stores.values())
    if all(stores.values()):
        return
    for store in draft.book.stores.values():
        shared, _ = divide((store.key_range,), key_range)
        if shared and shard.shard_id not in with_ancestors(draft.book.shards, store.store_id):
            yield store


def adopt(draft: Draft, store_id: str, server_id: str) -> ShardState | None:
    """Own the last shard of a store whose timers would have no server otherwise, under a new epoch. None: no such store."""
    store = draft.stores.get(store_id)
    if store is None or store.closed or store.next_due_ms is None:
        return None
    shards = _shards_of(draft, store_id)
    if not shards or any(not shard.ended or shard.owner not in {None, server_id} for shard in shards):
        return None
    last = max(shards, key=lambda shard: (shard.ended_ms, shard.shard_id))
    adopted = replace(last, epoch=last.epoch + 1, owner=server_id)
    draft.shards.put(last.shard_id, adopted)
    return adopted


# Flushes.


def refused(draft: Draft, flush: Flush) -> set[str]:
    """Return the shards of the flush's stores that are closed, unknown, or at another serial than the flush goes on from."""
    lost: set[str] = set()
    for update in flush.stores:
        store = draft.stores.get(update.store_id)
        if store is None or store.closed or store.serial != update.previous:
            if not update.shards:
                raise _bug(f"The flush names no shard of the store {update.store_id}.", store=update.store_id)
            lost.update(update.shards)
    return lost


def change(draft: Draft, flush: Flush) -> None:
    """Raise the serials of a flush's stores, and name its file. Raises InternalError for a file of other stores or ranges."""
    file = flush.state_file
    fenced = {update.shard_id for update in flush.positions}
    needed: dict[str, tuple[KeyRange, ...]] = {}
    for update in flush.stores:
        store = draft.stores.get(update.store_id)
        assert store is not None, "a flush of an unknown store is refused"
        if fenced.isdisjoint(update.shards):
            what = f"The flush changes the store {store.store_id}, but names the epoch of none of its shards."
            raise _bug(what, store=store.store_id)
        needed[store.store_id] = (store.key_range,)
        changed = replace(store, serial=store.serial + 1, next_due_ms=update.next_due_ms)
        draft.stores.put(store.store_id, changed)
    if file is None or file.needed != needed:
        raise _bug("The flush's state file is not for exactly its stores and their ranges.")
    if draft.state_files.get(file.path) is not None:
        raise _bug(f"The state file {file.path} is registered already.")
    draft.state_files.put(file.path, file)


def _bug(what: str, **where: str) -> InternalError:
    advice = "Report this with the log: it is a bug."
    return InternalError(what, did="The flush was rolled back.", advice=advice, **where)


# Files.


def compact(
    draft: Draft, file: StateFile, replaced: Mapping[str, Mapping[str, tuple[KeyRange, ...]]], now_ms: int
) -> bool:
    """Name a file in place of others, for the stores and ranges that it is needed for; False if the ledger changed since.

    The other files may still be needed for other stores or ranges.
    """
    if draft.state_files.get(file.path) is not None:
        return True  # the answer was lost
    known = [draft.state_files.get(path) for path in replaced]
    files = [each for each in known if each is not None and each.needed == replaced[each.path]]
    stores = [draft.stores.get(store_id) for store_id in file.needed]
    if len(files) < len(replaced) or any(store is None or store.closed for store in stores):
        return False
    draft.state_files.put(file.path, file)
    for each in files:
        needed = dict(each.needed)
        for store_id, ranges in file.needed.items():
            left = needed.pop(store_id, ())
            for key_range in ranges:
                _, left = divide(left, key_range)
            if left:
                needed[store_id] = left
        _put_needed(draft, each, needed, now_ms)
    return True


def _put_needed(
    draft: Draft, file: StateFile, needed: Mapping[str, tuple[KeyRange, ...]], now_ms: int
) -> None:
    draft.state_files.put(file.path, replace(file, needed=needed, gone_ms=None if needed else now_ms))


def forget_files(draft: Draft, paths: Iterable[str]) -> None:
    """Forget deleted files; files that a store needs stay."""
    for path in paths:
        file = draft.state_files.get(path)
        if file is not None and not file.needed:
            draft.state_files.drop(path)


# Forgetting.


def forget_state(draft: Draft, shard_ids: Iterable[str], now_ms: int) -> frozenset[str]:
    """Forget the stores of shards, unless a server holds a shard of the store; return the shards that have no store now.

    The epochs of all shards of such a store rise, so that no flush that is under way changes it.
    """
    asked = {shard_id: shard for shard_id in shard_ids if (shard := draft.shards.get(shard_id)) is not None}
    sharing = [
        shard
        for shard in draft.book.shards.values()
        if shard.store and shard.store in {each.store for each in asked.values()}
    ]
    gone = {shard.store for shard in sharing} - {shard.store for shard in sharing if shard.owner is not None}
    for shard in sharing:
        if shard.store in gone:
            draft.shards.put(shard.shard_id, replace(shard, store="", epoch=shard.epoch + 1))
    for path in draft.book.needed_files:
        file = draft.book.state_files[path]
        needed = {store_id: ranges for store_id, ranges in file.needed.items() if store_id not in gone}
        if len(needed) < len(file.needed):
            _put_needed(draft, file, needed, now_ms)
    for store_id in gone:
        draft.stores.drop(store_id)
    return frozenset(shard_id for shard_id, shard in asked.items() if not shard.store or shard.store in gone)


def last_holders(book: Book) -> frozenset[str]:
    """Return the shards that must be remembered, because children that come later find their store by them.

    They are the shards whose store has state, except those with a child in the same store.
    """
    if not book.stores:
        return frozenset()
    needed = _needed(book)
    passed_on = {
        parent
        for shard in book.shards.values()
        for parent in shard.parents
        if shard.store and parent in book.shards and book.shards[parent].store == shard.store
    }
    return frozenset(
        shard_id
        for shard_id, shard in book.shards.items()
        if shard.store in needed and shard_id not in passed_on
    )


def drop_unused(draft: Draft) -> None:
    """Drop the stores that need no file and whose shards are all forgotten."""
    if not draft.book.stores:
        return
    left = (draft.shards.get(shard_id) for shard_id in draft.book.shards)
    used = {shard.store for shard in left if shard is not None} | _needed(draft.book)
    for store_id in draft.book.stores.keys() - used:
        draft.stores.drop(store_id)
