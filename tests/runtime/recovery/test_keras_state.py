"""Which fits keep their state in memory, and how the next generation uses it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tfos_nb.errors import TfosError
from tfos_nb.runtime.feed.row_queue import RowQueue
from tfos_nb.runtime.host.held_files import HeldFiles
from tfos_nb.runtime.recovery import keras_state
from tfos_nb.runtime.recovery.keras_resume import save_whole_epochs
from tfos_nb.runtime.recovery.keras_state import FitHooks, FitKeeping
from tfos_nb.runtime.recovery.memory_state import MOST_FITS, FinishedFits, LastState, StateMemory
from tfos_nb.runtime.recovery.save_request import SaveRequest
from tfos_nb.runtime.recovery.stored_states import StoredStates
from tfos_nb.runtime.storage.checkpoint_directory import CheckpointDirectory
from tfos_nb.runtime.storage.uploads import SavingFlag

NO_HOOKS = FitHooks(*[lambda *of, **more: None] * 5)
X = np.arange(32.0).reshape(32, 1) / 32
Y = 3 * X + 1


@pytest.fixture(params=["keras", "tf_keras"])
def flavour(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each of the two versions of Keras; unpatched again after the test."""
    both = [pytest.importorskip(name) for name in ("keras", "tf_keras")]
    for keras in both:
        for name in ("fit", "_maybe_load_initial_counters_from_ckpt"):
            if hasattr(keras.Model, name):
                monkeypatch.setattr(keras.Model, name, getattr(keras.Model, name))
    return next(keras for keras in both if keras.__name__ == request.param)


@pytest.fixture
def memory() -> Iterator[StateMemory]:
    memory = StateMemory()
    yield memory
    memory.close()


@pytest.fixture
def on_disk() -> Iterator[HeldFiles]:
    files = HeldFiles()
    for _ in range(MOST_FITS):
        files.add_on_disk()
    yield files
    files.close()


@pytest.fixture
def generation(memory: StateMemory, on_disk: HeldFiles, flavour: Any, tmp_path: Any) -> Callable[[int], RowQueue]:
    """Begin a generation as a new process would, with the state memory of the previous one."""
    own = flavour.Model.fit

    def begin(number: int, stored: StoredStates | None = None, hooks: FitHooks = NO_HOOKS) -> RowQueue:
        queue = RowQueue("worker:0", str(tmp_path), 1 << 20, 1 << 20, lambda message: None)
        if number > 1:
            queue.begin_generation()
        flavour.Model.fit = own
        held, request = (lambda: None), SaveRequest()
        finished = FinishedFits(on_disk.places)
        given = {"generation": number, "workers": 1, "stored": stored, "hooks": hooks}
        FitKeeping(LastState(memory.places), finished, queue, held, request, **given).begin()
        return queue

    return begin


def build(keras: Any, units: int = 1) -> Any:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(units, kernel_initializer="zeros")])
    model.compile(loss="mse", optimizer=keras.optimizers.SGD(0.05, momentum=0.9))
    return model


def fit(model: Any, epochs: int, **options: Any) -> Any:
    return model.fit(X, Y, epochs=epochs, batch_size=8, shuffle=False, verbose=0, **options)


class Lost(Exception):
    """The error that stands in for the loss of a process."""


class Begun:
    """Records the epochs that a fit has begun."""

    def __init__(self, keras: Any) -> None:
        self.epochs: list[int] = []
        self.callback = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: self.epochs.append(epoch))


def lose_in(keras: Any, epoch: int) -> Any:
    def on_epoch_begin(number: int, logs: Any = None) -> None:
        if number == epoch:
            raise Lost

    callback = keras.callbacks.Callback()
    callback.on_epoch_begin = on_epoch_begin
    return callback


def test_a_resumed_fit_ends_with_the_weights_of_an_uninterrupted_one(
    generation: Callable[[int], RowQueue], flavour: Any
) -> None:
    whole = build(flavour)
    wanted_history = fit(whole, 6)
    generation(1)
    with pytest.raises(Lost):
        fit(build(flavour), 6, callbacks=[Begun(flavour).callback, lose_in(flavour, 3)])
    generation(2)
    model, begun = build(flavour), Begun(flavour)
    history = fit(model, 6, callbacks=[begun.callback])
    assert begun.epochs == [3, 4, 5]
    assert history.epoch == wanted_history.epoch
    np.testing.assert_allclose(history.history["loss"], wanted_history.history["loss"], rtol=1e-6)
    for found, wanted in zip(model.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_a_fit_continues_from_the_state_on_the_disk_if_the_memory_is_gone(
    memory: StateMemory, generation: Callable[..., RowQueue], flavour: Any, tmp_path: Path
) -> None:
    whole = build(flavour)
    fit(whole, 6)
    stored = StoredStates(str(tmp_path), 1e-9, SavingFlag(lambda going_on: None))
    generation(1, stored)
    with pytest.raises(Lost):
        fit(build(flavour), 6, callbacks=[lose_in(flavour, 3)])
    stored.finish()
    LastState(memory.places).clear()
    generation(2, StoredStates(str(tmp_path), 3600.0, SavingFlag(lambda going_on: None)))
    model, begun = build(flavour), Begun(flavour)
    fit(model, 6, callbacks=[begun.callback])
    assert begun.epochs == [3, 4, 5]
    for found, wanted in zip(model.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_a_directory_that_cannot_be_read_is_an_error_only_if_no_memory_has_a_state(
    memory: StateMemory,
    generation: Callable[..., RowQueue],
    flavour: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(directory: CheckpointDirectory) -> Any:
        raise OSError(f"{directory.path}: no answer")

    monkeypatch.setattr(CheckpointDirectory, "checkpoints", fail)
    stored = StoredStates(str(tmp_path), 3600.0, SavingFlag(lambda going_on: None))
    generation(1, stored)
    with pytest.raises(Lost):
        fit(build(flavour), 4, callbacks=[lose_in(flavour, 2)])
    generation(2, stored)
    begun = Begun(flavour)
    with pytest.raises(Lost):
        fit(build(flavour), 4, callbacks=[begun.callback, lose_in(flavour, 3)])
    assert begun.epochs == [2, 3], "the memory has it"
    LastState(memory.places).clear()
    generation(3, stored)
    with pytest.raises(
        TfosError, match="no node has a state in memory, and those that were written cannot be read: .*no answer"
    ):
        fit(build(flavour), 4)


def three_fits(keras: Any, lost_in: int = -1) -> tuple[list[list[int]], list[Any], Any]:
    """Fit a model three times, with another optimizer each time; return the epochs begun, the weights and history."""
    model, begun, weights = build(keras), [], []
    for number, epochs in enumerate((2, 3, 6)):
        model.compile(loss="mse", optimizer=keras.optimizers.Adam(0.1 / (number + 1)))
        seen = Begun(keras)
        history = fit(model, epochs, callbacks=[seen.callback, *([lose_in(keras, lost_in)] if number == 2 else [])])
        begun.append(seen.epochs)
        weights.append(model.get_weights())
    return begun, weights, history.history["loss"]


@pytest.mark.parametrize("memory_is_lost", [False, True])
@pytest.mark.parametrize("lost_in_epochs", [(3, 4), (0, 4)], ids=["", "before its first state"])
def test_a_later_fit_continues_and_those_before_it_are_not_repeated(
    memory: StateMemory,
    on_disk: HeldFiles,
    generation: Callable[..., RowQueue],
    flavour: Any,
    tmp_path: Path,
    memory_is_lost: bool,
    lost_in_epochs: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StoredStates, "is_due", True)  # also while the one before is being written
    _, wanted, losses = three_fits(flavour)
    for number, lost_in in enumerate(lost_in_epochs, 1):
        stored = StoredStates(str(tmp_path / "c"), 3600.0, SavingFlag(lambda going_on: None))
        generation(number, stored if memory_is_lost else None)
        with pytest.raises(Lost):
            three_fits(flavour, lost_in)
        stored.finish()
        if memory_is_lost:
            LastState(memory.places).clear()
            for place in on_disk.places:
                os.truncate(place, 0)
    queue = generation(3, StoredStates(str(tmp_path / "c"), 3600.0, SavingFlag(lambda going_on: None)))
    begun, weights, found = three_fits(flavour)
    assert begun == [[], [], [4, 5]]
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for one, other in zip(weights, wanted, strict=True):
        np.testing.assert_allclose(one[0], other[0], rtol=1e-5)
    assert queue.passes_done == 0, "of rows that were not fed, there is no pass"


def test_a_fit_that_was_continued_with_more_epochs_is_given_back_with_its_last_weights(
    generation: Callable[..., RowQueue], flavour: Any
) -> None:
    generation(1)
    fit(build(flavour), 2)
    generation(2)
    model = build(flavour)
    fit(model, 4)
    weights = model.get_weights()
    with pytest.raises(Lost):
        fit(model, 5, callbacks=[lose_in(flavour, 3)])  # its states take the place of the first one
    generation(3)
    again, begun = build(flavour), Begun(flavour)
    assert fit(again, 4, callbacks=[begun.callback]).epoch == [0, 1, 2, 3]
    assert begun.epochs == []
    for one, other in zip(again.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_fit_that_the_user_stops_within_an_epoch_continues_with_that_epoch(
    generation: Callable[..., RowQueue], flavour: Any, tmp_path: Path
) -> None:
    def stop(batch: int, logs: Any = None) -> None:
        if batch == 1 and begun.epochs[-1] == 2:
            model.stop_training = True

    stored = StoredStates(str(tmp_path), 3600.0, SavingFlag(lambda going_on: None))
    generation(1, stored, FitHooks(*[lambda *of, **more: None] * 4, lambda model: model.stop_training))
    model, begun = build(flavour), Begun(flavour)
    fit(model, 5, callbacks=[begun.callback, flavour.callbacks.LambdaCallback(on_train_batch_end=stop)])
    generation(2)
    model, begun = build(flavour), Begun(flavour)
    assert fit(model, 5, callbacks=[begun.callback]).epoch == [0, 1, 2, 3, 4]
    assert begun.epochs == [2, 3, 4]


@pytest.mark.parametrize("broken_by", ["number", "rows"])
def test_a_fit_that_does_not_follow_the_last_one_starts_from_its_beginning(
    generation: Callable[..., RowQueue], flavour: Any, monkeypatch: pytest.MonkeyPatch, broken_by: str
) -> None:
    passes = [0]
    monkeypatch.setattr(RowQueue, "begun", property(lambda queue: passes[0]))
    if broken_by == "number":
        monkeypatch.setattr(keras_state, "MOST_FITS", 1)

    def fits(queue: RowQueue, lost_in: int = -1) -> list[int]:
        fit(build(flavour), 2)
        passes[0] += broken_by == "rows"
        begun = Begun(flavour)
        fit(build(flavour), 5, callbacks=[begun.callback, lose_in(flavour, lost_in)])
        return begun.epochs

    with pytest.raises(Lost):
        fits(generation(1), 3)
    assert fits(generation(2)) == [0, 1, 2, 3, 4]


def test_a_fit_that_a_callback_ended_is_neither_repeated_nor_trained_further(
    generation: Callable[[int], RowQueue], flavour: Any
) -> None:
    def stop() -> Any:
        return flavour.callbacks.EarlyStopping(
            monitor="loss", patience=1, min_delta=100.0, restore_best_weights=True, start_from_epoch=1
        )

    generation(1)
    whole = build(flavour)
    wanted = fit(whole, 9, callbacks=[stop()])
    assert 2 <= len(wanted.epoch) < 9
    for number in (2, 3):
        generation(number)
        model, again = build(flavour), stop()
        begun = Begun(flavour)
        found = fit(model, 9, callbacks=[again, begun.callback])
        assert begun.epochs == []
        assert (found.epoch, found.history) == (wanted.epoch, wanted.history)
        assert model.stop_training
        assert again.stopped_epoch == wanted.epoch[-1]
        for one, other in zip(model.get_weights(), whole.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_fit_starts_from_scratch_if_rows_were_read_before_it(
    generation: Callable[[int], RowQueue], flavour: Any
) -> None:
    generation(1)
    with pytest.raises(Lost):
        fit(build(flavour), 4, callbacks=[lose_in(flavour, 3)])
    queue = generation(2)
    queue.ask()  # as when a layer is adapted to the rows
    assert fit(build(flavour), 4).epoch == [0, 1, 2, 3]


def test_the_state_of_another_model_is_not_used(
    generation: Callable[[int], RowQueue], flavour: Any, caplog: pytest.LogCaptureFixture
) -> None:
    generation(1)
    with pytest.raises(Lost):
        fit(build(flavour), 4, callbacks=[lose_in(flavour, 3)])
    generation(2)
    assert fit(build(flavour, units=2), 2).epoch == [0, 1]
    assert "not of this model" in caplog.text


@pytest.mark.parametrize("options", [{"steps_per_epoch": 2}, {"callbacks": "backup"}])
def test_no_state_is_kept_if_epochs_are_not_passes_or_a_backup_is_given(
    generation: Callable[[int], RowQueue], flavour: Any, memory: StateMemory, options: dict[str, Any], tmp_path: Any
) -> None:
    if options.get("callbacks"):
        options = {"callbacks": [flavour.callbacks.BackupAndRestore(str(tmp_path / "backup"))]}
    generation(1)
    fit(build(flavour), 2, **options)
    assert LastState(memory.places).newest() is None


@pytest.fixture
def backup(flavour: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Keras' BackupAndRestore; unpatched again after the test."""
    kind = flavour.callbacks.BackupAndRestore
    monkeypatch.setattr(kind, "on_train_begin", kind.on_train_begin)
    return kind


def test_a_backup_requested_within_epochs_is_saved_at_their_ends(
    flavour: Any, backup: Any, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    saved: list[int] = []
    mtime: list[float] = []

    def look(batch: int, logs: Any = None) -> None:
        files = [path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()]
        saved.append(len(files))
        mtime.append(max(files, default=0))

    save_whole_epochs()
    callbacks = [backup(str(tmp_path / "b"), save_freq=1), flavour.callbacks.LambdaCallback(on_train_batch_end=look)]
    fit(build(flavour), 2, callbacks=callbacks)
    assert saved[:4] == [0] * 4, "of the first epoch's four batches"
    assert min(saved[4:]) > 0
    assert len(set(mtime[4:])) == 1, "nothing is written in the second one"
    assert caplog.text.count("BackupAndRestore(save_freq=1) saves only at the end of each epoch here") == 1


def test_a_csv_log_keeps_the_lines_of_earlier_trainings(
    generation: Callable[[int], RowQueue], flavour: Any, tmp_path: Any
) -> None:
    table = tmp_path / "t.csv"
    table.write_text("epoch,loss\n" + "".join(f"{epoch},0.5\n" for epoch in range(6)))
    generation(1)
    logger = flavour.callbacks.CSVLogger(str(table), append=True)
    with pytest.raises(Lost):
        fit(build(flavour), 5, callbacks=[logger, lose_in(flavour, 3)])
    logger.csv_file.close()
    with table.open("a") as file:
        file.write("3,0.1\n")  # an epoch whose state was not kept
    generation(2)
    fit(build(flavour), 5, callbacks=[flavour.callbacks.CSVLogger(str(table), append=True)])
    assert [line.split(",")[0] for line in table.read_text().splitlines()] == ["epoch", *"012345", *"01234"]


def test_a_csv_log_keeps_its_columns(generation: Callable[[int], RowQueue], flavour: Any, tmp_path: Any) -> None:
    """The first epoch has had other metrics than the one after the loss: a rate, and none of the validation."""

    def rate() -> Any:
        return flavour.callbacks.ReduceLROnPlateau(monitor="loss")

    options = {"validation_data": (X, Y), "validation_freq": 2}
    tables = [tmp_path / f"{name}.csv" for name in ("whole", "broken")]
    loggers = [flavour.callbacks.CSVLogger(str(table)) for table in tables]
    fit(build(flavour), 4, callbacks=[rate(), loggers[0]], **options)
    generation(1)
    with pytest.raises(Lost):
        fit(build(flavour), 4, callbacks=[rate(), loggers[1], lose_in(flavour, 3)], **options)
    loggers[1].csv_file.close()
    generation(2)
    fit(build(flavour), 4, callbacks=[rate(), flavour.callbacks.CSVLogger(str(tables[1]))], **options)
    whole, broken = ([line.split(",") for line in table.read_text().splitlines()] for table in tables)
    assert broken[0] == whole[0]
    for line, wanted in zip(broken[1:], whole[1:], strict=True):
        assert [cell == "NA" for cell in line] == [cell == "NA" for cell in wanted]


def test_what_goes_on_in_a_process_is_not_kept_of_tensorboard(flavour: Any, tmp_path: Any) -> None:
    """A trace that was begun in the lost process cannot be ended in another."""
    from tfos_nb.runtime.recovery import fit_contents

    board = flavour.callbacks.TensorBoard(str(tmp_path), profile_batch=(2, 100))
    before = fit_contents._attributes(board)
    model = build(flavour)
    board.set_model(model)
    board.on_train_begin()
    for batch in range(3):
        board.on_train_batch_begin(batch)
    assert board._is_tracing
    kept = fit_contents._changed(fit_contents._attributes(board), before)
    assert not {"_is_tracing", "_profiler_started"} & kept.keys()
    assert any("train" in name for name in kept), "its steps"
    board.on_train_end()


def test_a_fit_that_a_callback_ended_is_not_trained_further(
    generation: Callable[[int], RowQueue], flavour: Any
) -> None:
    def lose(logs: Any = None) -> None:
        raise Lost

    class Stop(flavour.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = epoch == 1

    generation(1)
    with pytest.raises(Lost):
        callbacks = [Stop(), flavour.callbacks.LambdaCallback(on_train_end=lose)]
        fit(build(flavour), 5, callbacks=callbacks)
    generation(2)
    assert fit(build(flavour), 5, callbacks=[Stop()]).epoch == [0, 1]


def test_the_optimizers_of_nested_models_are_resumed(generation: Callable[[int], RowQueue], flavour: Any) -> None:
    if flavour.__name__ != "keras":
        pytest.skip("tf_keras applies gradients in another way")
    import tensorflow as tf

    class Both(flavour.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = build(flavour)
            self.outer = flavour.layers.Dense(1, kernel_initializer="zeros")
            self.outer.build((None, 1))
            self.built = True

        def call(self, x: Any) -> Any:
            return self.outer(x)

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            for layer, optimizer in ((self.inner, self.inner.optimizer), (self.outer, self.optimizer)):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((layer(x) - y) ** 2)
                optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
            return {"loss": loss}

    def both() -> Any:
        model = Both()
        model.compile(optimizer=flavour.optimizers.Adam(0.1), loss="mse")
        return model

    whole = both()
    fit(whole, 4)
    generation(1)
    with pytest.raises(Lost):
        fit(both(), 4, callbacks=[lose_in(flavour, 2)])
    generation(2)
    model = both()
    fit(model, 4)
    assert int(model.inner.optimizer.iterations) == int(whole.inner.optimizer.iterations)
    for found, wanted in zip(model.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_a_callbacks_bfloat16_arrays_are_kept() -> None:
    import ml_dtypes

    from tfos_nb.runtime.recovery import fit_contents

    weights = [np.arange(4, dtype=ml_dtypes.bfloat16).reshape(2, 2), np.ones(3)]
    found = fit_contents._with_arrays(fit_contents._named_arrays({"best": weights}))["best"]
    assert [one.dtype for one in found] == [one.dtype for one in weights]
    for one, wanted in zip(found, weights, strict=True):
        np.testing.assert_array_equal(one, wanted)
