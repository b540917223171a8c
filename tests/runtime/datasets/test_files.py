"""Files that nodes read by themselves: even shares of every format, local and over HTTP, and unreadable files."""

from __future__ import annotations

import functools
import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.control.plan import Node, Role
from tfos_nb.runtime.datasets.dataset import DatasetOptions
from tfos_nb.runtime.datasets.files import list_files
from tfos_nb.runtime.datasets.formats import reading
from tfos_nb.runtime.program.row_sources import RowSources
from tfos_nb.runtime.program.strategies import ClusterTask
from tfos_nb.runtime.storage.paths import tf_path

SIZES = (70, 1, 0, 45, 7)  # rows of each file
ROWS = sum(SIZES)


class Reader:
    """The part of a worker's ``ctx`` that reads files."""

    def __init__(self, index: int = 0, workers: int = 1) -> None:
        spec = {"worker": [f"host:{port}" for port in range(workers)]}
        self.failures: list[FeedFailed] = []
        no_queues: Any = None
        self._sources = RowSources(ClusterTask(Node(Role.WORKER, index), spec), no_queues, self.failures.append)
        self.files = self._sources.files

    def read(
        self,
        pattern: Any,
        batch_size: int,
        *,
        format: str | None = None,
        shuffle: int = 0,
        seed: int = 0,
        share: str = "rows",
        **options: Any,
    ) -> Any:
        """Read as ``ctx.read`` does."""
        of_format = {name: options.pop(name, None) for name in ("features", "types", "image_size")}
        kind = reading(pattern, format, **of_format)
        return self._sources.read(kind, DatasetOptions(batch_size, **options), shuffle=shuffle, seed=seed, share=share)


def table_of(start: int, count: int) -> pa.Table:
    ids = np.arange(start, start + count)
    return pa.table({"id": pa.array(ids, pa.int64()), "x": pa.array(ids / 4, pa.float32())})


def example_of(number: int, **more: Any) -> bytes:
    feature = {
        "id": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
        "pair": tf.train.Feature(float_list=tf.train.FloatList(value=[number / 4, 1.0])),
        "name": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"row"])),
        **more,
    }
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


def write(kind: str, path: Path, start: int, count: int) -> None:
    if kind == "parquet":
        pq.write_table(table_of(start, count), path, row_group_size=20)
    elif kind == "csv":
        pyarrow.csv.write_csv(table_of(start, count), path)
    else:
        options = tf.io.TFRecordOptions(compression_type="GZIP" if path.suffix == ".gz" else "")
        with tf.io.TFRecordWriter(str(path), options) as writer:
            for number in range(start, start + count):
                writer.write(example_of(number))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same rows in every format, in files of very different sizes, one of them without a row."""
    folder = tmp_path_factory.mktemp("files")
    for kind, ending in (("parquet", "parquet"), ("csv", "csv"), ("tfrecord", "tfrecord"), ("gzip", "tfrecord.gz")):
        (folder / kind).mkdir()
        (folder / kind / "_SUCCESS").touch()
        starts = np.cumsum([0, *SIZES]).tolist()
        for number, (start, count) in enumerate(zip(starts, SIZES, strict=False)):
            write(kind, folder / kind / f"part-{number}.{ending}", start, count)
    return folder


def ids_of(dataset: Any) -> list[int]:
    return [int(number) for batch in dataset.as_numpy_iterator() for number in batch["id"]]


KINDS = ("parquet", "csv", "tfrecord", "gzip")


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_shares_differ_by_at_most_one_row_and_contain_every_row_once(folder: Path, kind: str, workers: int) -> None:
    shares = [ids_of(Reader(index, workers).read(f"{folder}/{kind}", 16)) for index in range(workers)]
    assert [number for share in shares for number in share] == list(range(ROWS))
    assert {len(share) for share in shares} <= {ROWS // workers, -(-ROWS // workers)}


@pytest.mark.parametrize("kind", KINDS)
def test_each_shuffled_pass_differs_but_repeats_for_the_same_seed(folder: Path, kind: str) -> None:
    def passes(seed: int) -> list[list[list[int]]]:
        nodes = [Reader(index, 3).read(f"{folder}/{kind}", 16, shuffle=32, seed=seed) for index in range(3)]
        return [[ids_of(node) for node in nodes] for _ in range(3)]

    once, again, other = passes(5), passes(5), passes(6)
    assert once == again
    assert len({str(order) for order in (*once, *other)}) == 6
    for shares in (*once, *other):
        assert sorted(number for share in shares for number in share) == list(range(ROWS))
        assert {len(share) for share in shares} == {ROWS // 3}


@pytest.mark.parametrize("kind", KINDS)
def test_share_files_gives_each_worker_whole_files(folder: Path, kind: str) -> None:
    shares = [ids_of(Reader(index, 2).read(f"{folder}/{kind}", 16, share="files")) for index in range(2)]
    assert [len(share) for share in shares] == [SIZES[0] + SIZES[2] + SIZES[4], SIZES[1] + SIZES[3]]
    assert sorted(shares[0] + shares[1]) == list(range(ROWS))


def test_a_directory_is_listed_as_spark_lists_it(tmp_path: Path) -> None:
    read = ["_day=1/b", "a"]
    for name in (*read, "_SUCCESS", "_day/c", "part-0._COPYING_", ".hidden/d"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [file.url for file in list_files(str(tmp_path))] == [f"{tmp_path}/{name}" for name in read]


def test_files_returns_every_nth_name(folder: Path) -> None:
    shares = [Reader(index, 2).files(f"{folder}/parquet/*.parquet") for index in range(2)]
    names = [f"{folder}/parquet/part-{number}.parquet" for number in range(5)]
    assert shares == [names[::2], names[1::2]]
    assert [file.url for file in list_files(f"{folder}/parquet")] == names  # without _SUCCESS
    assert [file.url for file in list_files([names[1], names[0], names[1]])] == names[:2]
    assert Reader().files(f"file://{folder}/parquet/part-0.*") == [f"file://{names[0]}"]


def test_columns_become_what_fit_takes(folder: Path) -> None:
    x, y, weight = next(iter(Reader().read(f"{folder}/csv/part-0.csv", 4, x="x", y="id", class_weight={1: 5.0})))
    assert x.numpy().tolist() == [0.0, 0.25, 0.5, 0.75]
    assert (y.numpy().tolist(), weight.numpy().tolist()) == ([0, 1, 2, 3], [1.0, 5.0, 1.0, 1.0])
    for wrong, told in (
        ({"1": 5.0}, "the class '1', but column 'id' has int64"),
        ({1: "5"}, "must be a number, got '5'"),
    ):
        with pytest.raises(tf.errors.OpError, match=told):
            next(iter(Reader().read(f"{folder}/csv/part-0.csv", 4, x="x", y="id", class_weight=wrong)))
    x, y, weight = next(iter(Reader().read(f"{folder}/gzip", 3, x=["pair"], y="id", class_weight={2: 5.0})))
    assert x["pair"].numpy().tolist() == [[0.0, 1.0], [0.25, 1.0], [0.5, 1.0]]
    assert weight.numpy().tolist() == [1.0, 1.0, 5.0]


def test_records_are_parsed_by_the_given_features_or_left_unparsed(folder: Path) -> None:
    path = f"{folder}/tfrecord/part-0.tfrecord"
    told = next(iter(Reader().read(path, 2, features={"id": tf.io.FixedLenFeature([], tf.int64)})))
    assert {name: value.numpy().tolist() for name, value in told.items()} == {"id": [0, 1]}
    raw = next(iter(Reader().read(path, 2, features={})))
    assert raw["record"].numpy().tolist() == [example_of(0), example_of(1)]


def test_a_row_without_values_in_a_ragged_feature_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ids.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number, ids in enumerate([[1, 2], [3], []]):
            writer.write(example_of(number, ids=tf.train.Feature(int64_list=tf.train.Int64List(value=ids))))
    ragged = {"ids": tf.io.RaggedFeature(tf.int64), "id": tf.io.FixedLenFeature([], tf.int64)}
    node = Reader()
    with pytest.raises(tf.errors.OpError):
        list(node.read(str(path), 4, features=ragged, x="ids", y="id"))
    assert str(node.failures[0]).startswith(
        "feature 'ids' has no values in row 2 of a batch, and a mean or maximum over none is NaN"
    )
    ((ids, _),) = node.read(str(path), 2, features=ragged, x="ids", y="id").take(1)
    assert ids.to_list() == [[1, 2], [3]]
    (both,) = node.read(str(path), 4, features=ragged, columns=["ids"])
    assert both["ids"].to_list() == [[1, 2], [3], []]
    padded = {**ragged, "ids": tf.io.FixedLenSequenceFeature([], tf.int64, allow_missing=True)}
    ((ids, _),) = node.read(str(path), 4, features=padded, x="ids", y="id")
    assert ids.numpy().tolist() == [[1, 2], [3, 0], [0, 0]]


def test_csv_columns_have_the_given_types(folder: Path) -> None:
    batch = next(iter(Reader().read(f"{folder}/csv", 4, types={"id": "float32", "x": "string"})))
    assert (batch["id"].dtype, batch["x"].dtype) == (tf.float32, tf.string)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(9):
        place = folder / ("cats", "dogs", "eels")[number % 3]
        place.mkdir(exist_ok=True)
        pixels = np.full((4 + number % 2, 5, 3), number * 10, np.uint8)
        (place / f"{number}.png").write_bytes(tf.io.encode_png(pixels).numpy())
    return folder


def test_images_are_labelled_by_directory_and_resized(pictures: Path) -> None:
    seen = []
    for index in range(2):
        for batch in Reader(index, 2).read(str(pictures), 4, image_size=(2, 3)):
            assert batch["image"].shape[1:] == (2, 3, 3)
            assert batch["image"].dtype == tf.uint8
            values = batch["image"].numpy()[:, 0, 0, 0] // 10
            seen += list(zip(values.tolist(), batch["label"].numpy().tolist(), strict=True))
    assert sorted(seen) == [(number, number % 3) for number in range(9)]


def test_an_image_of_another_size_and_a_file_that_is_not_an_image_are_named(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(FeedFailed, match=r"3\.png is 5x5, and the first image 4x5: give image_size"):
        list(source_of(Reader().read, str(pictures), format="images"))
    (tmp_path / "no.png").write_bytes(b"nothing")
    with pytest.raises(FeedFailed, match=r"no\.png is not an image that TensorFlow can read"):
        Reader().read(str(tmp_path), 4)


def source_of(read: Any, *args: Any, **options: Any) -> Iterator[Any]:
    """Read as a dataset does, but without TensorFlow, which would reword our errors."""
    from tfos_nb.runtime.datasets.files import FileSource
    from tfos_nb.runtime.datasets.formats import reading

    kind = reading(args[0], options.get("format"), features=None, types=options.get("types"), image_size=None)
    yield from FileSource(kind, (0, 1), shuffle=0, seed=0, share=options.get("share", "rows")).next_pass() or ()


# --- remote -----------------------------------------------------------------------------------------------------------


class Ranged(http.server.SimpleHTTPRequestHandler):
    """A server that supports range requests, as object stores do."""

    def do_GET(self) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if wanted is None or not path.is_file():
            super().do_GET()
            return
        content, start, end = path.read_bytes(), int(wanted[1]), int(wanted[2])
        part = content[start : end + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{start + len(part) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[str]:
    handler = functools.partial(Ranged, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_is_read_from_a_server(site: str, kind: str) -> None:
    ending = {"gzip": "tfrecord.gz"}.get(kind, kind)
    names = [f"{site}/{kind}/part-{number}.{ending}" for number in range(5)]
    shares = [ids_of(Reader(index, 3).read(names, 16)) for index in range(3)]
    assert [number for share in shares for number in share] == list(range(ROWS))
    assert list_files(f"{site}/{kind}/*.{ending}")[0].url == names[0]


def test_every_format_is_read_from_an_in_memory_store(folder: Path) -> None:
    memory = fsspec.filesystem("memory")
    for kind in KINDS:
        memory.put(str(folder / kind), f"/shared/{kind}", recursive=True)
        assert ids_of(Reader().read(f"memory://shared/{kind}", 64)) == list(range(ROWS))
    memory.rm("/shared", recursive=True)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (
            "/nowhere/*.parquet",
            r"/nowhere/\*\.parquet matches no file, seen from .*The nodes read it",
        ),
        ("/nowhere", "/nowhere matches no file"),
        ([], "no pattern was given"),
        ("s3://bucket/x.parquet", "cannot be opened on .*s3fs.*every host"),
        ("nosuch://x", "cannot be opened on .*nosuch"),
    ],
)
def test_a_pattern_that_matches_no_files_is_refused(pattern: Any, words: str) -> None:
    with pytest.raises(FeedFailed, match=words):
        Reader().read(pattern, 16)


def test_mixed_and_unknown_file_formats_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FeedFailed, match=r"several formats: .*\.csv is csv, .*\.parquet is parquet"):
        Reader().read([f"{folder}/csv/part-0.csv", f"{folder}/parquet/part-0.parquet"], 16)
    (tmp_path / "rows.dat").write_text("1")
    with pytest.raises(FeedFailed, match=r"rows\.dat: its name has no known ending; give format="):
        Reader().read(str(tmp_path), 16)


def second_file(tmp_path: Path, name: str, content: Any) -> str:
    kind = name.rpartition(".")[2]
    write(kind, tmp_path / f"a.{kind}", 0, 30)
    if isinstance(content, pa.Table):
        pq.write_table(content, tmp_path / name)
    else:
        (tmp_path / name).write_bytes(content)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("b.parquet", pa.table({"id": ["one"], "x": [1.0]}), r"b\.parquet: column 'id' is string, and in .*a\.parquet"),
        ("b.parquet", pa.table({"id": [1]}), r"b\.parquet: column 'x' is missing"),
        ("b.parquet", b"no parquet", r"b\.parquet: Parquet magic bytes not found|b\.parquet: "),
        ("b.csv", b"id,x\none,2\n", r"b\.csv: .*invalid value 'one'.*set others with types="),
        ("b.csv", b"id,y\n1,2\n", r"b\.csv: column 'x' is missing, and in .*a\.csv it is double; write all files"),
        ("b.csv", b"id,x\n1,2,3\n", r"b\.csv: .*Expected 2 columns, got 3"),
        ("b.tfrecord", b"id,x\n1,2\n3,4\n5,6\n", r"b\.tfrecord is not a TFRecord file, or is damaged"),
    ],
)
def test_a_file_that_differs_from_the_first_is_named(tmp_path: Path, name: str, content: Any, words: str) -> None:
    path = second_file(tmp_path, name, content)
    with pytest.raises(FeedFailed, match=words):
        list(source_of(None, path))


def test_csv_files_without_rows_are_left_out_in_any_position(tmp_path: Path) -> None:
    for name, text in (("a", ""), ("b", "id,x\n"), ("c", "id,x\n1,2.5\n3,4.5\n5,6.5\n"), ("d", "id,x\n")):
        (tmp_path / f"{name}.csv").write_text(text)
    shares = [ids_of(Reader(index, 2).read(str(tmp_path), 2)) for index in range(2)]
    assert shares == [[1], [3, 5]]
    assert ids_of(Reader().read(str(tmp_path), 2, share="files")) == [1, 3, 5]
    with pytest.raises(FeedFailed, match=r"none of the \d files has a row; the first is .*a\.csv"):
        Reader().read([f"{tmp_path}/a.csv", f"{tmp_path}/b.csv"], 2)


@pytest.mark.parametrize("cut", [1, 4, 15, 60])
def test_an_incompletely_written_file_is_named(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a.tfrecord"
    write("tfrecord", path, 0, 3)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(FeedFailed, match=r"a\.tfrecord ends within a record"):
        list(source_of(None, str(path)))


@pytest.mark.parametrize("place", [12, 40, -2], ids=["record", "within", "checksum"])
def test_a_damaged_record_is_named_by_its_position(tmp_path: Path, place: int) -> None:
    path = tmp_path / "a.tfrecord"
    write("tfrecord", path, 0, 3)
    content = bytearray(path.read_bytes())
    third = len(content) // 3
    content[2 * third + place if place > 0 else place] ^= 1
    path.write_bytes(content)
    words = rf"a\.tfrecord is damaged: the checksum of the record at byte {2 * third} is wrong"
    with pytest.raises(FeedFailed, match=words):
        list(source_of(None, str(path)))


def test_an_option_of_another_format_and_a_missing_column_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"features= is for format='tfrecord', and these files are csv"):
        Reader().read(f"{folder}/csv", 16, features={})
    with pytest.raises(ValueError, match="format must be one of csv, images"):
        Reader().read(f"{folder}/csv", 16, format="orc")
    with pytest.raises(ValueError, match="share must be 'rows' or 'files'"):
        Reader().read(f"{folder}/csv", 16, share="half")
    for kind in ("parquet", "tfrecord"):
        with pytest.raises(FeedFailed, match=r"no column 'idd'.*did you mean 'id'"):
            Reader().read(f"{folder}/{kind}", 16, columns=["idd"])


def test_tensorflow_names_a_feature_that_a_record_lacks(tmp_path: Path) -> None:
    with tf.io.TFRecordWriter(str(tmp_path / "a.tfrecord")) as writer:
        writer.write(example_of(0, more=tf.train.Feature(int64_list=tf.train.Int64List(value=[1]))))
        writer.write(example_of(1))
    with pytest.raises(tf.errors.InvalidArgumentError, match="Feature: more"):
        list(Reader().read(str(tmp_path), 16))


# --- paths ------------------------------------------------------------------------------------------------------------

SCHEMES = [
    *("adl", "abfs", "abfss", "dbfs", "file", "gs", "hdfs", "http", "https"),
    *("oss", "s3", "s3a", "s3n", "swift", "viewfs", "wasb", "wasbs"),
]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_url_of_any_scheme_is_unchanged(scheme: str) -> None:
    assert tf_path(f"{scheme}://place/data", "hdfs://nn:8020", "/home") == f"{scheme}://place/data"


@pytest.mark.parametrize(
    ("path", "system", "expected"),
    [
        ("/data", "hdfs://nn:8020", "hdfs://nn:8020/data"),
        ("/data", "file:///", "/data"),
        ("data", "file://", "/home/me/data"),
        ("data", "viewfs://pool/", "viewfs://pool/user/"),
        ("dbfs:/data", "file://", "dbfs:/data"),
        ("c:data", "file://", "/home/me/c:data"),
    ],
)
def test_a_path_is_resolved_on_the_default_file_system(path: str, system: str, expected: str) -> None:
    assert tf_path(path, system, "/home/me").startswith(expected)


def test_the_default_file_system_is_read_from_hadoops_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("YARN_CONF_DIR", raising=False)
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    assert tf_path("/data") == "/data"
    (tmp_path / "core-site.xml").write_text(
        "<configuration><property><name>fs.defaultFS</name><value>hdfs://nn:8020</value></property></configuration>"
    )
    assert tf_path("/data") == "hdfs://nn:8020/data"
