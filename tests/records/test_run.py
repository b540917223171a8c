"""The file of a run: what it records, and what it omits."""

from __future__ import annotations

import argparse
import enum
import json
import math
import os
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from tfos_nb.records.recorder import write_file
from tfos_nb.records.run import BadRun, Process, Run, from_json, plain_arguments, plan_arguments, this_process, to_json
from tfos_nb.runtime.control.plan import ClusterPlan
from tfos_nb.state.training_curve import Point

FINITE = some.floats(allow_nan=False, allow_infinity=False, width=32)
TEXTS = some.text(max_size=20)
DATA = some.recursive(
    some.none() | some.booleans() | some.integers(-(2**53), 2**53) | FINITE | TEXTS,
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


def a_run(**changes: Any) -> Run:
    point = Point(1, 8, {"loss": 0.25, "val_loss": 0.5}, True, 1)
    run = Run(
        "6f2c0a", "mnist", "DONE", 1000.5, 1009.0, 8.5, plan={"workers": 2}, points=(point,), process=this_process()
    )
    return replace(run, epochs=({"epoch": 1, "loss": 0.25, "val_loss": 0.5},), **changes)


@given(DATA, TEXTS, some.lists(FINITE, max_size=4))
def test_a_run_survives_writing_and_reading(argument: Any, error: str, losses: list[float]) -> None:
    epochs = tuple({"epoch": number, "loss": loss} for number, loss in enumerate(losses, 1))
    run = replace(a_run(arguments=plain_arguments({"x": argument}), error=error), epochs=epochs)
    again = from_json(to_json(run), "/runs/6f2c0a.json")
    assert again == run
    assert again.path == "/runs/6f2c0a.json"


def test_non_finite_numbers_are_kept_in_valid_json() -> None:
    odd = {"epoch": 1, "loss": math.nan, "up": math.inf, "down": -math.inf}
    point = Point(1, 1, {name: value for name, value in odd.items() if name != "epoch"}, True)
    text = to_json(replace(a_run(), epochs=(odd,), points=(point,)))
    json.loads(text, parse_constant=pytest.fail)
    found = from_json(text)
    assert math.isnan(found.epochs[0]["loss"])
    assert (found["up"], found["down"]) == ([math.inf], [-math.inf])
    assert math.isnan(found.points[0].metrics["loss"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not a JSON file"),
        ("[]", "not the record of a run"),
        ('{"a": 1}', "not the record of a run"),
        ('{"tfos_nb_run": 2}', "its format is 2, and this version of tfos_nb reads 1"),
        ('{"tfos_nb_run": true}', "its format is True, and this version of tfos_nb reads 1"),
        (to_json(a_run()).replace('"name": "', '"name": null, "x": "'), "None must be a text"),
        (to_json(a_run()).replace('"error": ""', '"error": null'), "None must be a text"),
        ('{"tfos_nb_run": 1}', "a part of it is missing or wrong"),
        ("[" * 100_000, "not a JSON file"),
        (to_json(a_run()).replace('"seconds": 8.5', '"seconds": "NaN"'), "nan must be from 0"),
        (to_json(a_run()).replace('"seconds": 8.5', '"seconds": "Infinity"'), "inf must be from 0"),
        (to_json(a_run()).replace('"rows": 0', f'"rows": {10**400}'), "a part of it is missing or wrong"),
        (to_json(a_run()).replace('"pid": ', '"pid": -'), "must be from 0"),
        (to_json(a_run()).replace('"started": "1970', '"started": "9998'), "must be from 0"),
        (to_json(a_run()).replace('"epochs": [{', '"epochs": [1, {'), "a part of it is missing or wrong"),
        (to_json(a_run()).replace('"DONE"', '"FLYING"'), "a part of it is missing or wrong.*FLYING"),
        (to_json(a_run()).replace('[[1,8,1,1,{"loss"', '[[1,8,1,{"loss"'), "a part of it is missing or wrong"),
    ],
)
def test_another_file_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(BadRun, match=why):
        from_json(text)


class Kind(enum.Enum):
    FAST = 3


@dataclass
class Settings:
    lr: float = 0.5
    frame: object = None


def test_only_arguments_that_are_data_are_recorded() -> None:
    given = {
        "lr": np.float32(0.5),
        "steps": np.int64(3),
        "kind": Kind.FAST,
        "path": Path("/data/x"),
        "layers": (64, [32, 16]),
        "frame": object(),
        "image": np.zeros((2, 2)),
        "main": test_another_file_is_refused_with_the_reason,
        "deep": {"a": {"b": 1, "c": object()}},
        "long": "x" * 5_000,
    }
    found = plain_arguments(given)
    text = found.pop("long")
    assert text.startswith("xxx")
    assert text.endswith("…")
    assert len(text) <= 500
    assert found == {
        "lr": 0.5,
        "steps": 3,
        "kind": "FAST",
        "path": "/data/x",
        "layers": [64, [32, 16]],
        "deep": {"a": {"b": 1}},
    }
    assert plain_arguments(argparse.Namespace(lr=1)) == plain_arguments(SimpleNamespace(lr=1)) == {"lr": 1}
    assert plain_arguments(Settings(frame=object())) == {"lr": 0.5}
    assert plain_arguments({"most": math.inf, "no": math.nan}) == {"most": "inf", "no": "nan"}
    assert (plain_arguments(None), plain_arguments(7), plain_arguments(object())) == ({}, {"args": 7}, {})
    assert plain_arguments({"many": list(range(1_000))}) == {}


@pytest.mark.parametrize(
    "name",
    [
        *("api-key", "api key", "access.key", "api_keys", "tokens", "token1", "mytoken", "db_pass", "dbpass", "pw"),
        *("passphrase", "authorization", "bearer", "cookie", "connection_string", "hf_key", "OPENAIAPIKEY", "Secrets"),
    ],
)
@pytest.mark.parametrize("value", ["d34d", ["d34d"], {"value": "d34d"}])
def test_arguments_named_like_secrets_are_hidden(name: str, value: Any) -> None:
    assert "d34d" not in json.dumps(plain_arguments({name: value}))


@pytest.mark.parametrize(
    "text",
    [
        *("s3://me:d34/d@b", "jdbc:x://h/d?user=me&password=d34d", "wasbs://c@h/x?sig=d34d", "HTTPS://h/x?y=d34d"),
        *("s3://b/x?X-Amz-Signature=d34d", "hdfs://me:d34d@nn:8020/x", "AccountName=x;AccountKey=d34d"),
    ],
)
def test_secrets_in_urls_are_hidden(text: str) -> None:
    assert "d34" not in json.dumps(plain_arguments({"place": text}))


@pytest.mark.parametrize(
    "argument",
    [
        *(["--password", "d34d"], ["--token=d34d"], ("password", "d34d"), [("password", "d34d")], "--token d34d -v"),
        *("curl -H 'Authorization: Bearer d34d'", "Authorization: d34d", "Bearer d34d.d34d.d34d"),
        *("host=h user=me password=d34d", "export HF_TOKEN=d34d; run", "password: d34d", '{"password": "d34d"}'),
        *("train --password 'd34d x'", "X-Api-Key: d34d", "Basic bWU6ZDM0ZA==d34d", "amqp://me:d3@d34d@h"),
        *("jdbc:oracle:thin:me/d34d@//db", "s3://h/?user=a&passphrase=d34d", "https://h/x#access_token=d34d"),
        [{"name": "password", "value": "d34d"}],
        *("ValueError: password=d34d", "RuntimeError: api_key=d34d", 'KeyError: "password=d34d"', "dsn=password=d34d"),
        *("INFO:root:password=d34d", "PYSPARK: spark.x.password=d34d", "args: Namespace(password='d34d')"),
        *("Failed: password: d34d", "Cookie: session=d34d; other=d34d", "password=a,d34d", "password=a&d34d"),
        *("password=-d34d", "password=<d34d>", "error: conn: token: 'd34d'"),
    ],
)
def test_secrets_in_options_and_headers_are_hidden(argument: Any) -> None:
    for arguments in (argument, {"argv": argument}):
        found = plain_arguments(arguments)
        assert found
        assert "d34d" not in json.dumps(found)


@pytest.mark.parametrize(
    "secret",
    [
        *(
            "hf_" + "aB3" * 11,
            "ghp_" + "aB3" * 12,
            "glpat-" + "aB3" * 7,
            "sk-proj-" + "aB3" * 9,
            "xoxb-" + "12345-" * 4,
        ),
        *(
            "AKIA" + "Q7" * 8,
            "dapi" + "0a" * 16,
            "AIza" + "aB3-_" * 7,
            "eyJ" + "aB3" * 4 + ".eyJ" + "aB3" * 4 + ".x-_9",
        ),
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\nMIIE without an end",
    ],
)
def test_tokens_that_a_service_has_made_are_hidden_by_their_form(secret: str) -> None:
    (text,) = plain_arguments({"note": f"see {secret}"}).values()
    assert text == "see …"


def test_a_password_of_curl_is_hidden_and_words_like_tokens_are_kept() -> None:
    kept = "hf_model sk-learn AKIA task-list eyJ dapi"
    assert plain_arguments({"a": "curl -u me:d34d https://h", "b": "curl --user=me:d34d h"}) == {
        "a": "curl -u … https://h",
        "b": "curl --user=… h",
    }
    assert plain_arguments({"note": kept}) == {"note": kept}


def test_options_that_are_not_secrets_are_kept() -> None:
    argv = ["--epochs", "3", "--max-tokens", "100", "--optimizer=adam", "-v", "--tokenizer", "bpe"]
    assert plain_arguments({"argv": argv, "line": " ".join(argv)}) == {"argv": argv, "line": " ".join(argv)}


def test_an_argument_whose_own_methods_fail_is_left_out() -> None:
    class Odd:
        shape = ()

        def item(self) -> float:
            raise RuntimeError

    assert plain_arguments({"odd": Odd(), "lr": 0.1}) == {"lr": 0.1}


def test_a_file_keeps_the_newest_epochs() -> None:
    epochs = tuple({"epoch": number, "loss": 1.0} for number in range(1, 2_502))
    assert [epoch["epoch"] for epoch in from_json(to_json(replace(a_run(), epochs=epochs))).epochs] == [
        *range(502, 2_502)
    ]


def test_a_huge_integer_is_recorded_as_text(tmp_path: Path) -> None:
    found = plain_arguments({"n": 10**5000, "m": 10**400, "seed": 2**64})
    assert found == {"n": "an integer of 16610 bits", "m": "an integer of 1329 bits", "seed": 2**64}


def test_a_lone_surrogate_in_a_text_can_be_written(tmp_path: Path) -> None:
    run = replace(a_run(), error="no file '\udcff.png' in Zürich")
    write_file(str(tmp_path / "run.json"), run)
    written = (tmp_path / "run.json").read_text(encoding="utf-8")
    assert "Zürich" in written
    assert from_json(written).error == run.error


def test_other_texts_are_unchanged() -> None:
    texts = {"note": "see //comment and mail me@x.org", "path": "/data/a@b", "url": "http://h:80/x", "tokenizer": "bpe"}
    assert plain_arguments({**texts, "password": 123456, "sort_key": "id"}) == {
        **texts,
        "password": "…",
        "sort_key": "id",
    }


def test_secrets_are_omitted() -> None:
    given = {"HF_TOKEN": "d34d", "s3": {"secretKey": "d34d", "bucket": "b"}, "url": "https://me:d34d@host/x?sig=d34d"}
    assert "d34d" not in json.dumps(plain_arguments(given))
    lists: list[Any] = [("me", "d34d"), ["-x", "d34d"], [["me", "d34d"], ["you", "d34d"]], ["-d34d", "d34d", "x"]]
    for name in ("auth", "credentials", "tokens", "password"):
        assert all("d34d" not in json.dumps(plain_arguments({name: one})) for one in lists)
    assert plain_arguments({"token": 123456789, "max_tokens": 1000000}) == {"token": "…", "max_tokens": 1000000}
    assert plain_arguments({"passwords": ["d34d"], "db_password": ["d34d"]})["db_password"] == ["…"]
    assert plain_arguments({"max_tokens": 7, "token": 7, "sort_key": "id"}) == {
        "max_tokens": 7,
        "token": 7,
        "sort_key": "id",
    }


def test_a_plan_is_recorded_without_its_defaults() -> None:
    assert plan_arguments(ClusterPlan(name="mnist")) == {"workers": 1}
    found = plan_arguments(ClusterPlan(2, ps=1, input_mode="tensorflow", gpus=1))
    assert found == {"workers": 2, "ps": 1, "chief": True, "input_mode": "tensorflow", "gpus": 1}
    json.dumps(found)


def test_a_running_run_whose_process_has_ended_counts_as_killed() -> None:
    here = socket.gethostname()
    now = time.time()
    assert a_run().outcome == "done"
    assert a_run(status="RUNNING", process=this_process()).outcome == "running"
    earlier = replace(this_process(), ticks=0, system="")  # as other versions have written it
    assert a_run(status="RUNNING", process=earlier).outcome == "running"
    assert a_run(status="RUNNING", process=Process(here, os.getpid(), now + 60)).outcome == "killed", "another process"
    assert a_run(status="RECOVERING", process=Process(here, 2**22 + 1, 5.0)).outcome == "killed"
    elsewhere = Process("elsewhere", 1, 5.0)
    assert a_run(status="RUNNING", process=elsewhere, updated=now - 60).outcome == "running"
    assert a_run(status="RUNNING", process=elsewhere, updated=now - 600).outcome == "killed"


def test_metrics_are_from_the_last_epoch() -> None:
    assert a_run().metrics == {"loss": 0.25, "val_loss": 0.5}
    assert replace(a_run(), epochs=()).metrics == {"loss": 0.25, "val_loss": 0.5}, "of the last report"
    assert replace(a_run(), epochs=(), points=()).metrics == {}
    with pytest.raises(KeyError):
        a_run()["epoch"]
    assert list(a_run().to_pandas()["loss"]) == [0.25]
