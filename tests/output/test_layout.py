from __future__ import annotations

import pytest

from mldserver.ledger.contract import SegmentKind
from mldserver.output import layout

pytestmark = pytest.mark.quick

TAG = layout.writer_tag("0123abcd", "host:1:x")
SHAPE = "0123456789ab"


def test_a_published_window_lies_in_a_hive_partition() -> None:
    assert layout.window_path("2013-01-01T10-00-00Z") == "window=2013-01-01T10-00-00Z"


def test_a_servers_tag_is_short_safe_in_names_and_its_own() -> None:
    tags = {layout.server_tag(name) for name in ("host:1:x", "host:1:y", "ホスト/../:2")}
    assert len(tags) == 3
    assert all(len(tag) == 8 and tag.isalnum() for tag in tags)


def segment(clock: int, kind: SegmentKind = SegmentKind.WINDOW) -> str:
    return layout.segment_path("w", clock, "u-1", kind=kind, tag=TAG, shape=SHAPE)


def test_segments_sort_by_clock_inside_their_window() -> None:
    paths = [segment(clock) for clock in (0, 9, 10, 10**15)]
    assert paths == sorted(paths)
    assert paths[1] == f"_mldserver/segments/w/0000000000000009-{TAG}-{SHAPE}-u-1.parquet"


def test_a_late_segment_is_published_into_the_late_dataset_under_its_own_name() -> None:
    path = segment(7, SegmentKind.LATE)
    assert path == f"_mldserver/segments/w/late-0000000000000007-{TAG}-{SHAPE}-u-1.parquet"
    assert layout.late_path(path) == f"_late/window=w/late-0000000000000007-{TAG}-{SHAPE}-u-1.parquet"


@pytest.mark.parametrize("root", [layout.STAGING, layout.OUTPUTS])
def test_each_attempt_has_a_folder_of_its_own(root: str) -> None:
    path = layout.attempt_path(root, "w", 12, TAG)
    assert path == f"{root}/w/0012-{TAG}"
    assert (layout.written(path).attempt, layout.written(path).tag) == (12, TAG)
    assert layout.written(layout.attempt_path(root, "w", 123_456, TAG)).attempt == 123_456


def test_what_is_no_attempts_folder_has_no_number() -> None:
    assert layout.written("_mldserver/staging/w/.exchange-one").attempt == 0


@pytest.mark.parametrize("kind", SegmentKind)
def test_a_segments_name_tells_which_server_wrote_it(kind: SegmentKind) -> None:
    assert layout.written(segment(5, kind)).tag == TAG


@pytest.mark.parametrize("path", [segment(5), layout.attempt_path(layout.STAGING, "w", 1, TAG)])
def test_names_tell_for_which_ledger_it_was_written(path: str) -> None:
    assert layout.written(path).ledger == "0123abcd"


@pytest.mark.parametrize("kind", SegmentKind)
def test_a_segments_name_tells_its_clock(kind: SegmentKind) -> None:
    assert layout.written(segment(10**17, kind)).clock == 10**17
    assert layout.written(layout.attempt_path(layout.STAGING, "w", 1, TAG)).clock == 0


@pytest.mark.parametrize(
    "name", ["x.parquet", "0000000000000009-u.parquet", "0001", "0001-0123abcd", "", "late-"]
)
def test_other_names_tell_nothing(name: str) -> None:
    assert layout.written(f"_mldserver/segments/w/{name}") == layout.Written()


@pytest.mark.parametrize("kind", SegmentKind)
def test_a_segments_name_tells_the_shape_of_its_rows(kind: SegmentKind) -> None:
    assert layout.written(segment(5, kind)).shape == SHAPE


def test_readers_of_the_output_see_neither_private_files_nor_late_rows() -> None:
    hidden = (
        layout.LEDGER,
        layout.SEGMENTS,
        layout.STAGING,
        layout.OUTPUTS,
        layout.LATE,
        layout.PUBLISH_LOCK,
    )
    assert all(path.startswith("_") for path in hidden)
