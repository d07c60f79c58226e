"""URIs as settings give them, as Spark and logs get them, and where they lead."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import fs

from mldserver.base import uris
from mldserver.base.uris import (
    SCHEMES,
    hadoop_settings,
    opened,
    reach,
    redacted,
    redacted_pairs,
    redaction,
    secrets_in,
    spark_uri,
)

pytestmark = pytest.mark.quick

URI = "s3://key:secret@bucket/a%20b/?endpoint_override=127.0.0.1:1&scheme=http&region=us-east-1"


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        (URI, "s3://bucket/a b"),
        ("s3://bucket", "s3://bucket"),
        ("gs://anonymous@bucket/x", "gs://bucket/x"),
        ("hdfs://user@host:9000/a/b?replication=1", "hdfs://host:9000/a/b"),
        ("abfss://box:word@me.dfs.core.windows.net/x", "abfss://box@me.dfs.core.windows.net/x"),
        ("abfs://me.dfs.core.windows.net/box/x", "abfs://me.dfs.core.windows.net/box/x"),
    ],
)
def test_spark_gets_names_without_options_and_credentials(uri: str, name: str) -> None:
    assert spark_uri(uri) == name


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        (URI, "s3://…@bucket/a%20b/?endpoint_override=127.0.0.1:1&scheme=http&region=us-east-1"),
        ("s3://bucket/x?secret_key=abc&region=r", "s3://bucket/x?secret_key=…&region=r"),
        ("abfs://box:word@me/x", "abfs://box:…@me/x"),
        ("abfs://box@me/x", "abfs://box@me/x"),
        ("hdfs:///x", "hdfs:///x"),
    ],
)
def test_logs_get_no_secrets(uri: str, shown: str) -> None:
    assert redacted(uri) == shown


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("local[*]", "local[*]"),
        ("spark://a:7077,b:7077", "spark://a:7077,b:7077"),
        ("sc://h:1/;use_ssl=true;token=abc;user_id=me", "sc://h:1/;use_ssl=true;token=…;user_id=me"),
        ("sc://h/;x-proxy=abc;grpc_keepalive_enabled=true", "sc://h/;x-proxy=…;grpc_keepalive_enabled=true"),
        ("sc://h/;TOKEN=a:b@c", "sc://h/;TOKEN=…"),
        (
            "jdbc:postgresql://me:abc@db/x?user=me&password=abc",
            "jdbc:postgresql://…@db/x?user=me&password=…",
        ),
        ("jdbc:oracle:thin:me/abc@db:1521", "jdbc:oracle:thin:me/…@db:1521"),
        ("s3://KEY:se/cret@bucket/x", "s3://…@bucket/x"),
        ("jsonl:s3://KEY:secret@bucket/x", "jsonl:s3://…@bucket/x"),
        (
            "dynamodb://t?endpoint_url=http://me:abc@h:1&region=r",
            "dynamodb://t?endpoint_url=http://…@h:1&region=r",
        ),
        ("Could not reach http://me:abc@h:1/, or x.", "Could not reach http://…@h:1/, or x."),
        ("http://h:8080/a@b", "http://h:8080/a@b"),
        ("mongodb://me:a@b:c@h:1/x", "mongodb://…@h:1/x"),
        (
            "jdbc:sqlserver://h;user=me;password={a;b};encrypt=true",
            "jdbc:sqlserver://h;user=me;password=…;encrypt=true",
        ),
        (
            "jdbc:mysql://address=(host=h)(user=me)(password=abc)/x",
            "jdbc:mysql://address=(host=h)(user=me)(password=…",
        ),
    ],
)
def test_an_address_is_shown_without_what_opens_it(address: str, shown: str) -> None:
    assert redacted(address) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("password=abc", "password=…"),
        ("a=b,key=c d=e", "a=b,key=… d=e"),
        ("a:b key=c", "a:b key=c"),
        ("?user name,mykey =c", "?user name,mykey =…"),
        ("?a;token={b;c", "?a;token=…;c"),
        ("?token=a?b=c:d&e=f", "?token=…&e=f"),
        ("said ('secret=abc')", "said ('secret=…"),
        ("?=key;:=pwd=x", "?=key;:=pwd=x"),
    ],
)
def test_a_secret_option_is_found_behind_each_kind_of_beginning(text: str, shown: str) -> None:
    assert redacted(text) == shown


class Counted:
    """A pattern that counts the characters of the texts it is given."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self.characters = 0

    def search(self, text: str, at: int = 0) -> re.Match[str] | None:
        found = self._pattern.search(text, at)
        self.characters += (found.end() if found else len(text)) - at
        return found

    def match(self, text: str, at: int) -> re.Match[str] | None:
        found = self._pattern.match(text, at)
        self.characters += (found.end() if found else len(text)) - at
        return found


@pytest.mark.parametrize(
    "text", [",key", "?key={;", ",'\"(", "?a key b", "a", "x=", "key=a&", "s3://a:b", "://@"]
)
def test_the_secrets_of_a_long_text_are_found_in_work_that_grows_with_its_length(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("_OPTION_ENDS", "_SECRET_WORD", "_IN_BRACES", "_VALUE")
    counted = [Counted(getattr(uris, name)) for name in names]
    for name, pattern in zip(names, counted, strict=True):
        monkeypatch.setattr(uris, name, pattern)
    long = text * 20_000
    redacted(long)
    assert sum(pattern.characters for pattern in counted) <= 4 * len(long)


def test_pairs_are_shown_in_their_order_without_their_secrets() -> None:
    pairs = {
        "spark.a": "1",
        "spark.hadoop.fs.s3a.secret.key": "hush",
        "spark.b": "-DkeyStorePassword=hush -Dx=y",
        "url": "http://me:hush@h",
    }
    assert list(redacted_pairs(pairs).items()) == [
        ("spark.a", "1"),
        ("spark.hadoop.fs.s3a.secret.key", "…"),
        ("spark.b", "…"),
        ("url", "http://…@h"),
    ]


def test_what_others_say_is_told_without_the_secrets_that_they_were_given() -> None:
    secrets = secrets_in(
        "sc://h:1/;user_id=me_myself;token=a%2Fb.c%3D%3D",
        {"spark.some.secret": "a/b.c==(longer)", "spark.authenticate": "true", "spark.use.tokens": "true"},
        {
            "user": "mldserver",
            "password": "open sesame",
            "url": "http://me:in-a-url@h",
            "quoted.token": 'q"uoted',
        },
    )
    said = "a/b.c==(longer) a/b.c== a%2Fb.c%3D%3D open sesame true mldserver me_myself axb.c== in-a-url"
    assert redaction(secrets)(said) == "… … … … true mldserver me_myself axb.c== …"
    assert redaction(secrets)('{"text": "q\\"uoted"}') == '{"text": "…"}'


def test_a_password_that_is_a_field_of_the_document_too_leaves_the_field_its_name() -> None:
    document = '{"windows":{"late_windows":1,"text":"windows: \\"windows\\": 2"},"shards":["windows"]}'
    shown = redaction({"windows"}, in_json=True)(document)
    assert shown == '{"windows":{"late_windows":1,"text":"…: \\"…\\": 2"},"shards":["…"]}'


@pytest.mark.parametrize("master", ["local[2]", "sc://h:1/;user_id=me_myself"])
def test_where_there_are_no_secrets_all_is_told(master: str) -> None:
    said = f"abcdefg me_myself {master}"
    assert redaction(secrets_in(master, {"spark.a": "abcdefg"}))(said) == said


def test_hadoop_is_led_to_a_bucket_as_pyarrow_is() -> None:
    emulated = {
        "fs.s3.impl": "org.apache.hadoop.fs.s3a.S3AFileSystem",
        "fs.s3a.bucket.bucket.access.key": "key",
        "fs.s3a.bucket.bucket.secret.key": "se/cret",
        "fs.s3a.bucket.bucket.endpoint": "127.0.0.1:1",
        "fs.s3a.bucket.bucket.endpoint.region": "us-east-1",
        "fs.s3a.bucket.bucket.path.style.access": "true",
        "fs.s3a.bucket.bucket.connection.ssl.enabled": "false",
    }
    assert hadoop_settings(URI.replace("secret", "se%2Fcret"), {}) == emulated
    assert set(hadoop_settings("s3://bucket/x", {})) == {"fs.s3.impl"}
    assert hadoop_settings("gs://bucket/x?region=r", {}) == {}
    assert hadoop_settings("", {}) == {}


def test_what_spark_conf_says_of_s3_wins_whether_of_the_bucket_or_of_all() -> None:
    given = {
        "spark.hadoop.fs.s3a.bucket.bucket.endpoint": "inside:9000",
        "spark.hadoop.fs.s3a.access.key": "another",
        "fs.s3a.secret.key": "on Spark Connect",
        "spark.hadoop.fs.s3.impl": "com.example.Files",
    }
    left = {name.removeprefix("fs.s3a.bucket.bucket.") for name in hadoop_settings(URI, given)}
    assert left == {"endpoint.region", "path.style.access", "connection.ssl.enabled"}


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_pyarrow_knows_every_scheme(scheme: str) -> None:
    told = ""
    try:
        opened(f"{scheme}://box/x?region=us-east-1" if scheme == "s3" else f"{scheme}://box/x")
    except (OSError, pa.ArrowInvalid) as error:  # Hadoop's library is not here; an account is missing
        told = str(error)
    assert "Unrecognized filesystem" not in told


def test_a_place_is_reached_through_the_output_folder_it_lies_in() -> None:
    filesystem, path = reach("s3://bucket/a b/c=1/x.parquet", URI)
    assert isinstance(filesystem, fs.S3FileSystem)
    assert path == "bucket/a b/c=1/x.parquet"
    assert reach("s3://bucket/a b/y", URI)[0] is filesystem
    with pytest.raises(ValueError, match="does not lie in s3://bucket/a b"):
        reach("s3://bucket/a bc", URI)


def test_a_local_place_is_itself(tmp_path: Path) -> None:
    filesystem, path = reach(str(tmp_path / "[1]"), "")
    assert isinstance(filesystem, fs.LocalFileSystem)
    assert path == str(tmp_path / "[1]")
