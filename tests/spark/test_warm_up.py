"""The window that a session computes first: on a disk of its own, and in the output's storage, where it is a proof."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mldserver.errors import NotThereYet, OperatorError
from mldserver.spark import warm_up as module
from mldserver.spark.driver_messages import LoadFunction
from mldserver.spark.session import DriverSession
from mldserver.spark.warm_up import warm_up

pytestmark = pytest.mark.slow

SCHEMA = "id BIGINT NOT NULL, name STRING"


def start(folder: Path, **more: Any) -> LoadFunction:
    """Return a function whose output lies behind a URI."""
    out = f"file://{folder}/out"
    return LoadFunction(schema=SCHEMA, **{"out": out, "place": f"{out}/own", **more})


def left(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def spoil(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[Any], None], after: Callable[[Any], None]
) -> None:
    """Do something to the proof's files when its job is planned, and when it is over."""
    write = module.write

    def spoiled(frame: Any, staging: str, jobs: Any, *rest: Any) -> Any:
        before(jobs[0])
        counts = write(frame, staging, jobs, *rest)
        after(jobs[0])
        return counts

    monkeypatch.setattr(module, "write", spoiled)


def local(place: str) -> Path:
    return Path(place.removeprefix("file://"))


def test_a_local_master_with_a_local_output_has_nothing_to_prove(
    tmp_path: Path, session: DriverSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(module, "_check_shared_storage")
    warm_up(session, start(tmp_path, out="", place=f"{tmp_path}/warm-up"))
    assert left(tmp_path) == []


def test_the_proof_is_given_in_the_outputs_storage_and_leaves_nothing_there_nor_in_the_session(
    tmp_path: Path, session: DriverSession
) -> None:
    killed = tmp_path / "out" / "own" / "1" / "segments" / "0.parquet"
    killed.parent.mkdir(parents=True)
    killed.write_text("of a driver that was killed")
    before = session.spark.conf.get("spark.sql.files.maxPartitionBytes")
    warm_up(session, start(tmp_path))
    assert left(tmp_path) == []
    assert session.spark.conf.get("spark.sql.files.maxPartitionBytes") == before


def unseen(job: Any) -> None:
    local(job.segments[0]).unlink()


def elsewhere(job: Any) -> None:
    file, *_ = local(job.staging).glob("part-*")
    file.unlink()


def nothing(_: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("before", "after"), [(unseen, nothing), (nothing, elsewhere)], ids=["unread", "unwritten"]
)
def test_what_an_executor_does_not_read_or_does_not_write_there_is_refused_with_its_host(
    tmp_path: Path, session: DriverSession, monkeypatch: pytest.MonkeyPatch, before: Any, after: Any
) -> None:
    spoil(monkeypatch, before, after)
    with pytest.raises(OperatorError) as refused:
        warm_up(session, start(tmp_path))
    assert not isinstance(refused.value, NotThereYet)
    assert "wrote 2 files" in refused.value.what
    assert "of 1 of them the executors' copies are here" in refused.value.what
    assert re.search(r"Those that failed are on \S+ \(executor driver\)\.", refused.value.what)
    assert "Set out to shared storage" in refused.value.what
    assert left(tmp_path) == []


def test_what_spark_does_not_find_at_all_is_refused_and_what_it_fails_on_may_be_right_at_the_next_start(
    tmp_path: Path, session: DriverSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = module._write_sample_job

    def unfound(*given: Any) -> Any:
        made = job(*given)
        unseen(made)
        return made

    with monkeypatch.context() as patched:
        patched.setattr(module, "_write_sample_job", unfound)
        with pytest.raises(OperatorError, match=r"(?s)PATH_NOT_FOUND.*Set out to shared storage") as refused:
            warm_up(session, start(tmp_path))
        assert not isinstance(refused.value, NotThereYet)

    def broken(made: Any) -> None:
        local(made.segments[0]).write_text("no Parquet")

    spoil(monkeypatch, broken, nothing)
    with pytest.raises(
        NotThereYet, match=r"(?s)Spark cannot work on windows in file:.*Set out to shared storage"
    ):
        warm_up(session, start(tmp_path))
