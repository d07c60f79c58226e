from __future__ import annotations

from mldserver.coordinator import layout


def test_a_published_window_lies_in_a_hive_partition() -> None:
    assert layout.window_path("2013-01-01T10-00-00Z") == "window=2013-01-01T10-00-00Z"


def test_segments_sort_by_clock_inside_their_window() -> None:
    paths = [layout.segment_path("w", clock, "u", late=False) for clock in (0, 9, 10, 10**15)]
    assert paths == sorted(paths)
    assert paths[1] == "_mldserver/segments/w/0000000000000009-u.parquet"


def test_a_late_segment_is_published_into_the_late_dataset_under_its_own_name() -> None:
    path = layout.segment_path("w", 7, "u", late=True)
    assert path == "_mldserver/segments/w/late-0000000000000007-u.parquet"
    assert layout.late_path(path) == "_late/window=w/late-0000000000000007-u.parquet"


def test_each_attempt_has_a_staging_folder_of_its_own() -> None:
    assert layout.staging_path("w", 1) == "_mldserver/staging/w/0001"
    assert layout.staging_path("w", 1) != layout.staging_path("w", 2)


def test_readers_of_the_output_see_neither_private_files_nor_late_rows() -> None:
    hidden = (layout.LEDGER, layout.SEGMENTS, layout.STAGING, layout.LATE)
    assert all(path.startswith("_") for path in hidden)
