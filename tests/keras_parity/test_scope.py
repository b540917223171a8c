"""All parts of a model must be made in the strategy's scope; others are refused before a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.keras_parity.workers import read_results, run
from tfos_nb.runtime.keras.versions import installed_keras

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Results], Results]:
    outs, alone = run(2, "scope", tmp_path_factory.mktemp("scope"))
    first, second, one = map(read_results, (*outs, alone))
    return [first, second], one


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("metric", "metric 'mine' was made outside of the strategy's scope: it would count the rows of one worker"),
        ("optimizer", "the optimizer of model 'sequential_1' was made outside of the strategy's scope. Make"),
        ("layer", "layer 'mine' was built outside of the strategy's scope: each worker would begin with"),
        ("compiled", "metric 'loss' was made outside of the strategy's scope"),
        ("model_alone", "was made outside of the strategy's scope, but its optimizer inside. Make and compile"),
        ("loss_by_row", "loss 'mean_squared_error' has reduction='none': one process trains on the sum"),
        ("stateful", "layer 'mine' must not be stateful under 2 replicas, got stateful=True: it keeps a state for"),
        ("fixed_batch", "input 'mine' must not have a fixed batch size where the model computes with it, got 37 rows"),
    ],
)
def test_a_part_that_would_train_differently_is_refused_by_name(
    ran: tuple[list[Results], Results], case: str, told: str
) -> None:
    workers, alone = ran
    trains_in_one_process = case != "stateful" or installed_keras() >= "3.13"  # 3.12 fails to compile such a layer
    assert ("error" not in alone[case]) is trains_in_one_process
    for worker in workers:
        assert told in worker[case]["error"]


@pytest.mark.parametrize("case", ["frozen_layer", "reads_numbers", "fixed_batch_that_does_not_matter"])
def test_a_part_that_trains_the_same_is_accepted(ran: tuple[list[Results], Results], case: str) -> None:
    (first, second), alone = ran
    assert "error" not in alone[case]
    assert first[case] == second[case]
    for name, values in alone[case]["history"].items():
        np.testing.assert_allclose(first[case]["history"][name], values, rtol=1e-5)
    for mine, theirs in zip(first[case]["weights"], alone[case]["weights"], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("text_as_labels", "column 'word', which is y, must hold numbers, because the loss 'binary_crossentropy'"),
        ("text_as_mapped_labels", "y must hold numbers, because the loss 'binary_crossentropy' compares it with"),
        ("text_as_input", "column 'word', which is x, must hold numbers, because the model's input"),
    ],
)
def test_text_instead_of_numbers_is_refused_with_its_column(
    ran: tuple[list[Results], Results], case: str, told: str
) -> None:
    workers, alone = ran
    for one in (*workers, alone):
        assert told in one[case]["error"]
        assert "StringIndexer" in one[case]["error"]


def test_text_that_the_program_converts_to_numbers_is_accepted(ran: tuple[list[Results], Results]) -> None:
    (first, second), alone = ran
    assert first["text_made_numbers"] == second["text_made_numbers"]
    np.testing.assert_allclose(
        first["text_made_numbers"]["history"]["loss"], alone["text_made_numbers"]["history"]["loss"], rtol=1e-5
    )


def test_a_warning_is_logged_if_each_worker_trains_its_own_model(ran: tuple[list[Results], Results]) -> None:
    workers, alone = ran
    assert alone["nothing_within"]["said"] == []
    for worker in workers:
        (said,) = worker["nothing_within"]["said"]
        assert "made outside of the strategy's scope, so each worker trains its own model" in said


def test_a_warning_is_logged_for_a_sum_over_the_rows_of_one_worker(ran: tuple[list[Results], Results]) -> None:
    workers, alone = ran
    assert alone["sums"]["said"] == [[], []]
    for worker in workers:
        of_mean, of_sum = worker["sums"]["said"]
        assert of_mean == []
        assert "a loss is made of sums over the rows of a batch" in of_sum[0]
