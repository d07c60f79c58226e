"""S3 on loopback: moto over HTTP, for what pyarrow's own client and Hadoop's S3A do with an object store.

Hadoop's part of it, ``hadoop-aws`` with Amazon's SDK, is inside a package for Python. That one asks for an older Spark, so
it is not installed: its source archive is downloaded once, and two jars are taken out.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from pyarrow import fs
from werkzeug.serving import WSGIRequestHandler, make_server

from mldserver.config.locations import cache_folder

_PACKAGE: Final = (
    "sagemaker-pyspark==1.4.5 --hash=sha256:05ca2d5081d7138ce29a8fb0a9cba077f28c825288ed07aed46a82e63c0bf1fb"
)
_JARS: Final = ("hadoop-aws-3.3.1.jar", "aws-java-sdk-bundle-1.11.901.jar")
_OLD: Final = {
    # Hadoop 3.5's defaults have units, which 3.3 does not read.
    "threads.keepalivetime": "60",
    "connection.establish.timeout": "30000",
    "connection.timeout": "200000",
    "connection.request.timeout": "0",
    "multipart.purge.age": "86400",
    # Names of classes that 3.3 does not have.
    "aws.credentials.provider": "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider",
    # As from 3.4 on.
    "directory.marker.retention": "keep",
    # moto keeps no versions.
    "change.detection.mode": "none",
    "change.detection.version.required": "false",
}
"""What lets S3A of Hadoop 3.3 run on Hadoop 3.5; one of the same version needs none of it."""


class _Quiet(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        pass


def s3a_conf() -> dict[str, str]:
    """Return Spark's configuration that gives it S3A. Skips the test where the jars cannot be had; in CI fails it."""
    jars = os.pathsep.join(map(str, _s3a_jars()))
    paths = {f"spark.{part}.extraClassPath": jars for part in ("driver", "executor")}
    return paths | {f"spark.hadoop.fs.s3a.{name}": value for name, value in _OLD.items()}


def _s3a_jars() -> list[Path]:
    folder = cache_folder(os.environ).with_name("mldserver-tests") / "s3a"
    folder.mkdir(parents=True, exist_ok=True)
    jars = [folder / name for name in _JARS]
    with (folder / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # against the other processes of this run
        if all(jar.exists() for jar in jars):
            return jars
        (folder / "wanted.txt").write_text(_PACKAGE)
        asked = ["--no-deps", "--no-binary=:all:", "--dest", str(folder), "--requirement", "wanted.txt"]
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", *asked],
            cwd=folder,
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            told = f"hadoop-aws cannot be had from {_PACKAGE.split()[0]}: {done.stderr[-2000:]}"
            (pytest.fail if os.environ.get("CI") else pytest.skip)(told)
        (archive,) = folder.glob("*.tar.gz")
        with tarfile.open(archive) as package:
            for member in package:
                if (name := member.name.rpartition("/")[2]) in _JARS:
                    content = package.extractfile(member)
                    assert content is not None
                    with (folder / f"{name}.part").open("wb") as part:
                        shutil.copyfileobj(content, part)
                    (folder / f"{name}.part").rename(folder / name)
        archive.unlink()
    return jars


@contextlib.contextmanager
def bucket(name: str, requests: list[str] | None = None) -> Iterator[str]:
    """Serve S3 with one bucket; give the query that leads pyarrow's ``s3://`` URIs to it.

    ``requests``: gets method and path of each request.
    """
    moto = DomainDispatcherApplication(create_backend_app)

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if requests is not None:
            requests.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
        return moto(environ, start_response)  # type: ignore[no-any-return]  # moto has no types

    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=_Quiet)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    query = (
        f"endpoint_override=127.0.0.1:{server.port}&scheme=http&region=us-east-1&allow_bucket_creation=true"
    )
    try:
        store, path = fs.FileSystem.from_uri(f"s3://key:secret@{name}?{query}")
        store.create_dir(path)
        yield query
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
