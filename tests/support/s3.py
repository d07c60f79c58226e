"""S3 on loopback: moto over HTTP, for what pyarrow's own client does with an object store."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from pyarrow import fs
from werkzeug.serving import WSGIRequestHandler, make_server

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Quiet(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def bucket(name: str) -> Iterator[str]:
    """Serve S3 with one bucket; give the query that leads pyarrow's ``s3://`` URIs to it."""
    server = make_server(
        "127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True, request_handler=_Quiet
    )
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
