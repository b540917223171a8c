"""Files of detached clusters' processes, and what ``attach`` says of those that it cannot ask."""

from __future__ import annotations

import json
import os
import stat
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import tfos_nb
from tfos_nb.detached import places
from tfos_nb.detached.places import DetachedPlace
from tfos_nb.driver.settings import Settings
from tfos_nb.errors import PlanError
from tfos_nb.records.run import this_process
from tfos_nb.runtime.control.plan import ClusterPlan

HERE = this_process()
GONE = replace(HERE, ticks=HERE.ticks - 1)  # the number is another process's now, as after a restart
ELSEWHERE = replace(HERE, host="elsewhere", system="another boot")


@pytest.fixture(autouse=True)
def data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data"


def a_place(name: str = "mnist", number: int = 1, **fields: object) -> DetachedPlace:
    usual = DetachedPlace(f"abcdef{number:06}", name, HERE, tfos_nb.__version__, "/nowhere/calls", time.time() + number)
    made = replace(usual, **fields)  # type: ignore[arg-type]
    places.publish(made)
    return made


def test_a_place_is_read_as_it_was_written_and_only_by_its_user(data_home: Path) -> None:
    made = a_place(model_dir="/models")
    assert places.find(made.id) == made
    assert tfos_nb.clusters() == [made]
    (file,) = data_home.rglob("*.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    made.log.write_text("output")
    places.forget(made.id)
    assert list(file.parent.iterdir()) == []
    assert tfos_nb.clusters() == []


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"id": 1}', '{"process": {}}', json.dumps({"id": "abcdef000001", "process": [1]})],
)
def test_a_file_that_is_no_place_is_left_out(content: str) -> None:
    made = a_place()
    (places.detached_directory() / f"{made.id}.json").write_text(content)
    assert places.find(made.id) is None
    assert tfos_nb.clusters() == []
    assert places.find("../abcdef000001") is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"launched": "yesterday"},
        {"process": asdict(HERE) | {"started": None}},
        *({"door": door} for door in (None, "x", [], {"port": "x"})),
    ],
)
def test_a_place_with_a_value_of_another_type_is_left_out(wrong: dict[str, object]) -> None:
    made, other = a_place(number=1), a_place(number=2)
    file = places.detached_directory() / f"{made.id}.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | wrong))
    assert tfos_nb.clusters() == [other]


def test_the_newest_running_cluster_of_a_name_is_meant_or_the_one_with_the_id() -> None:
    a_place(number=1, process=GONE)
    a_place(number=2, status="DONE", process=GONE)
    assert [one.status for one in tfos_nb.clusters()] == ["DONE", "LOST"], "the newest first"
    with pytest.raises(
        PlanError, match=r"^mnist has ended \(DONE\), and its process, which kept its results, has gone"
    ):
        tfos_nb.attach("mnist")
    with pytest.raises(PlanError, match=r"^mnist: its process \d+ on .* has gone without a result"):
        tfos_nb.attach("abcdef000001")


def written(folder: Path, at: float, **files: str) -> Path:
    """Write files into a folder, all with this time."""
    folder.mkdir(parents=True)
    for name, content in files.items():
        path = folder / name.replace("_", ".")
        path.write_text(content)
        os.utime(path, (at, at))
    os.utime(folder, (at, at))
    return folder


def said_of(place: DetachedPlace) -> str:
    with pytest.raises(PlanError) as caught:
        tfos_nb.attach(place.id)
    return str(caught.value)


PLACE = '{"epoch": 2, "generation": 1, "written": 1800000000}'
AT = 1_800_000_000.0  # 2027-01-15


def test_of_a_host_that_has_restarted_attach_names_the_last_complete_checkpoint_of_the_cluster(tmp_path: Path) -> None:
    place = a_place(process=GONE, model_dir=str(tmp_path), run="abcdef000003")
    own = tmp_path / "checkpoints" / place.run
    written(own / "fit" / ".part-123", AT + 90, state="half of a state")
    (own / ".tfos_nb-mark").write_text("x")
    written(own / "00000004", AT + 80, state="without the place.json that is written last")
    written(own / "00000005", AT + 70, place_json="")
    written(own / "part", AT + 70, weights="half of a backup")
    written(tmp_path / "checkpoints" / "abcdef000009" / "00000009", AT + 60, place_json=PLACE)
    (tmp_path / "train.csv").write_text("epoch")
    (tmp_path / "model.keras").write_text("of a later cluster")
    none = f"It has left no complete checkpoint in {own}. It has saved no model with ctx.save. Its output is in "
    assert none in said_of(place)
    for number, folder in enumerate(("00000001", "fit/00000002-0001-00000040", "state-3", "worker-1/state-4")):
        newest = written(own / folder, AT + number, place_json=PLACE)
        assert f"Its last complete checkpoint is {newest}, of 2027-01-1" in said_of(place)


def test_of_a_model_dir_that_is_a_url_attach_names_the_directory_alone() -> None:
    place = a_place(process=GONE, model_dir="s3://bucket/mnist", run="abcdef000003")
    told = (
        f"Its checkpoints, if it has saved any, are in s3://bucket/mnist/checkpoints/{place.run}: attach does not read"
    )
    assert told in said_of(place)


def test_attach_names_the_model_that_the_cluster_wrote_unless_it_was_replaced(tmp_path: Path) -> None:
    model = written(tmp_path / "models", AT, model_keras="its own") / "model.keras"
    place = a_place(process=GONE, model_dir=str(tmp_path), model=str(model), model_size=7, model_changed=int(AT * 1e9))
    assert f"Its model is {model}, of 2027-01-1" in said_of(place)
    model.write_text("of a later cluster")
    assert f"Its model was {model}, which is not on this host or was written again since" in said_of(place)
    assert "Its model is s3://bucket/m.keras" in said_of(
        a_place(number=2, process=GONE, status="DONE", model_dir="s3://bucket", model="s3://bucket/m.keras")
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"version": "9.9"}, r"launched with tfos_nb 9\.9, and this kernel has .*`kill \d+` stops it"),
        (
            {"process": ELSEWHERE},
            "its process runs on host elsewhere: attach from a kernel there",
        ),
    ],
)
def test_a_cluster_that_cannot_be_asked_from_here_is_refused(fields: dict[str, object], said: str) -> None:
    a_place(**fields)
    with pytest.raises(PlanError, match=said):
        tfos_nb.attach("mnist")


def test_a_process_is_known_though_the_clock_and_the_hosts_name_have_changed() -> None:
    a_place(process=replace(HERE, started=HERE.started + 5, host="laptop.other-network"))
    (place,) = tfos_nb.clusters()
    assert (place.status, place.process.runs()) == ("RUNNING", True)
    assert replace(HERE, system="another boot").runs() is False, "this host has restarted"
    assert ELSEWHERE.runs() is None


def test_a_cluster_of_a_version_with_other_fields_is_refused_by_its_version() -> None:
    place = a_place(version="9.9")
    file = places.detached_directory() / f"{place.id}.json"
    said = json.loads(file.read_text())
    del said["socket"], said["model_size"]
    said |= {"of_later": [1], "process": {**said["process"], "of_later": 1}}
    file.write_text(json.dumps(said))
    with pytest.raises(PlanError, match=r"launched with tfos_nb 9\.9, and this kernel has"):
        tfos_nb.attach("mnist")
    assert [one.version for one in places.places()] == ["9.9"]


def test_a_name_that_no_cluster_has_is_refused_with_those_that_exist() -> None:
    with pytest.raises(PlanError, match="no detached cluster on this host: launch"):
        tfos_nb.attach("mnist")
    a_place(number=1)
    a_place("cifar", 2)
    with pytest.raises(
        PlanError, match=r"no detached cluster 'minst'.*; there are cifar, mnist; did you mean 'mnist'\?"
    ):
        tfos_nb.attach("minst")
    with pytest.raises(PlanError, match=r"several clusters are possible \(cifar, mnist\): name one"):
        tfos_nb.attach()


def test_files_of_processes_that_have_gone_long_ago_are_removed() -> None:
    old = a_place(process=GONE, launched=time.time() - 40 * 86_400)
    ended = a_place(number=2, process=ELSEWHERE, status="DONE", launched=time.time() - 40 * 86_400)
    lives = a_place(number=3, launched=time.time() - 40 * 86_400)
    elsewhere = a_place(number=4, process=ELSEWHERE, launched=time.time() - 40 * 86_400)
    assert tfos_nb.clusters() == [elsewhere, lives], "it may still train there"
    assert places.find(old.id) is places.find(ended.id) is None


def test_a_launch_without_a_model_dir_leaves_that_of_a_detached_cluster_alone() -> None:
    plan = ClusterPlan(name="mnist")
    usual = Settings().model_dir_for("mnist")
    a_place(model_dir=usual)
    a_place(number=2, model_dir=f"{usual}-2", process=GONE)
    assert Settings().for_plan(plan, places.model_dirs()).model_dir_for("mnist") == f"{usual}-2"
