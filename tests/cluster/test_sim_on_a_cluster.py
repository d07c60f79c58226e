"""``mldserver sim --spark-master``: a whole pipeline, its windows computed on a real standalone cluster."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from support.cluster import CONF, spark_parts

pytestmark = [pytest.mark.services, pytest.mark.long]

SECRET = "hush-hush"


async def test_a_pipeline_is_played_on_a_cluster_and_its_log_holds_no_secret(tmp_path: Path) -> None:
    out, file = tmp_path / "out", tmp_path / "spark-defaults.conf"
    given = {**CONF, "spark.hadoop.fs.s3a.secret.key": SECRET, "spark.master": "spark://nowhere:1"}
    file.write_text("".join(f"{name}  {value}\n" for name, value in given.items()))
    async with spark_parts(tmp_path) as parts:
        await parts.cluster(workers=1)
        played = ["--limit", "300", "--out", str(out), "--spark-master", parts.url]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "mldserver", "sim", "handlers.departures_daily", *played),
            env={**os.environ, "SPARK_CONF_DIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        said = (await process.communicate())[0].decode()
    log = (out / "_server.log").read_text()
    assert process.returncode == 0, said + log
    assert f'"master":"{parts.url}"' in log
    assert SECRET not in said + log
    flights = [pq.ParquetFile(part).read()["flights"].to_pylist() for part in out.glob("window=*/*.parquet")]
    assert sum(map(sum, flights)) == 300
