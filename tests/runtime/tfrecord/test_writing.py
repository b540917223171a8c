"""Tasks write files and the driver commits them, without Spark: which files stay, also after a failure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest

from tests.runtime.tfrecord.test_framing import read
from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.tfrecord.fields import Field, RecordType
from tfos_nb.runtime.tfrecord.files import found
from tfos_nb.runtime.tfrecord.writing import Encoding, WriteJob, write_part

ROWS = pa.record_batch({"x": pa.array([1, 2, 3], pa.int64())})


def job_at(url: str, *, gzip: bool = False, partitioned: bool = False, name: str = "job") -> WriteJob:
    partition = ((0, "k"),) if partitioned else ()
    job = WriteJob(url, Encoding((Field("x", "bigint"),), partition, RecordType.EXAMPLE, gzip), name)
    return job.begin()


def there(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def records(path: Path) -> int:
    return sum(len(read(Path(file.url).read_bytes())[0]) for file in found(str(path)))


def test_only_the_attempt_that_spark_accepted_is_committed(tmp_path: Path) -> None:
    job = job_at(str(tmp_path / "out"))
    write_part(job, [ROWS], 0)
    taken = write_part(job, [ROWS], 0)
    assert len(there(tmp_path / "out/_temporary-job")) == 2
    job.commit([taken])
    assert there(tmp_path / "out") == ["_SUCCESS", "part-00000-job.tfrecord"]
    assert records(tmp_path / "out") == 3


def test_a_failed_task_leaves_no_readable_files(tmp_path: Path) -> None:
    def rows() -> Iterator[pa.RecordBatch]:
        yield ROWS
        raise ZeroDivisionError

    job = job_at(str(tmp_path / "out"))
    with pytest.raises(ZeroDivisionError):
        write_part(job, rows(), 0)
    assert there(tmp_path) == []
    job.abort()
    assert not (tmp_path / "out").exists()


def test_a_failed_job_keeps_the_existing_files(tmp_path: Path) -> None:
    first = job_at(str(tmp_path), name="first")
    first.commit([write_part(first, [ROWS], 0)])
    second = job_at(str(tmp_path), name="second")
    write_part(second, [ROWS], 0)
    second.abort()
    assert there(tmp_path) == ["_SUCCESS", "part-00000-first.tfrecord"]


def test_a_failed_job_keeps_an_empty_directory_that_it_did_not_create(tmp_path: Path) -> None:
    job_at(str(tmp_path)).abort()
    assert tmp_path.is_dir()


def test_an_overwrite_leaves_only_the_new_files(tmp_path: Path) -> None:
    rows = pa.record_batch({"k": ["a", "b", "a"], "x": pa.array([1, 2, 3], pa.int64())})
    for name, overwrite in (("first", False), ("second", True)):
        job = job_at(str(tmp_path), partitioned=True, name=name)
        batch = rows if name == "first" else rows.slice(0, 1)
        job.commit([write_part(job, [batch], 0)], overwrite=overwrite)
    assert there(tmp_path) == ["_SUCCESS", "k=a/part-00000-second.tfrecord"]
    assert not (tmp_path / "k=b").exists()


def test_a_dynamic_overwrite_keeps_the_partitions_that_it_does_not_write(tmp_path: Path) -> None:
    rows = pa.record_batch({"k": ["a", "b", "a"], "x": pa.array([1, 2, 3], pa.int64())})
    for name, overwrite in (("first", False), ("second", True)):
        job = dataclasses.replace(job_at(str(tmp_path), partitioned=True, name=name), dynamic=True)
        job.commit([write_part(job, [rows if name == "first" else rows.slice(0, 1)], 0)], overwrite=overwrite)
    found = there(tmp_path)
    assert found == ["_SUCCESS", "k=a/part-00000-second.tfrecord", "k=b/part-00000-first.001.tfrecord"]


def test_a_task_without_rows_writes_no_file(tmp_path: Path) -> None:
    job = job_at(str(tmp_path))
    job.commit([write_part(job, [], 0), write_part(job, [ROWS.slice(0, 0)], 1)])
    assert there(tmp_path) == ["_SUCCESS"]


def test_many_directories_do_not_need_as_many_open_files(tmp_path: Path) -> None:
    keys = [str(number % 100) for number in range(300)]
    rows = pa.record_batch({"k": keys, "x": pa.array(range(300), pa.int64())})
    job = job_at(str(tmp_path), partitioned=True)
    written = write_part(job, [rows, rows], 0)
    job.commit([written])
    assert len({file.place for file in written.files}) == len(written.files) > 100
    assert records(tmp_path) == 600
    assert len(list(tmp_path.glob("k=*"))) == 100


def test_the_error_for_a_file_that_is_not_visible_here_names_the_host(tmp_path: Path) -> None:
    job = job_at(str(tmp_path))
    written = write_part(job, [ROWS], 0)
    Path(written.files[0].temporary).unlink()
    with pytest.raises(FeedFailed, match=f"which an executor on {written.host} wrote, is not visible"):
        job.commit([written])


def test_a_task_that_cannot_see_the_drivers_directory_fails_with_that_reason(tmp_path: Path) -> None:
    job = job_at(str(tmp_path))
    job.abort()
    with pytest.raises(FeedFailed, match="which the driver made, is not visible"):
        write_part(job, [ROWS], 0)


def test_a_url_is_written_like_a_path() -> None:
    job = job_at("memory://tfrecord-writing/out", gzip=True)
    job.commit([write_part(job, [ROWS], 0)])
    fs = fsspec.filesystem("memory")
    (name,) = [path for path in fs.find("/tfrecord-writing") if not path.endswith("_SUCCESS")]
    assert name.endswith("/out/part-00000-job.tfrecord.gz")
    assert len(read(fs.cat(name))[0]) == 3


def test_a_batch_of_large_rows_is_written_in_several_pieces(tmp_path: Path) -> None:
    rows = pa.record_batch({"x": pa.array([b"\1" * 1_000_000] * 40)})
    encoding = Encoding((Field("x", "binary"),), (), RecordType.EXAMPLE, gzip=False)
    pieces = list(encoding.pieces([rows]))
    assert sum(count for _, count, _ in pieces) == 40
    assert max(data.size for _, _, data in pieces) < 10_000_000
