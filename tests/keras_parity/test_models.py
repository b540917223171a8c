"""Models that train in one process train on several workers to the same numbers, with all parts of Keras."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.keras_parity.workers import read_results, run

ROWS = "37"
"""Two workers have 19 and 18 of them, three have 13, 12 and 12."""
FEW_ROWS = "3/2"
"""Two rows a step: in the second step one of two workers has no row."""

# The cases of `make test`: one for each patch of Keras, and programs that needed a patch. The others are slow.
SOME = (
    "global_clipnorm", "optimizer ema_overwrite", "gradient_accumulation Adam", "takes a mean, weighted", "adds a loss",
    "metric function that compares rows, weighted", "loss function of pairs", "steps_per_execution",
    "two optimizers and no call", "own arguments", "own compute_loss", "outputs with",
    "a compute_loss with a masked mean", "strings", "positions, Adam", "overridden apply_gradients",
)  # fmt: skip
OF_FEW_ROWS = (
    "masked pooling",
    "divides by a mask",
    "loss function that compares rows, weighted",
    "own train_step that clips",
    "a step with a masked mean",
    "a step that accumulates",
    "run_eagerly",
    "mixed_float16",
    "results that a compute_metrics",
)


def assert_near(one: Any, other: Any, near: float, what: str) -> None:
    np.testing.assert_allclose(np.asarray(one, float), np.asarray(other, float), rtol=near, atol=near, err_msg=what)


class Trained:
    """The results of the cases on several workers, and in one process."""

    def __init__(self, folder: Path, workers: int, *plans: str) -> None:
        outs, alone = run(workers, "train", folder, *plans)
        self.workers = [read_results(out) for out in outs]
        self.alone = read_results(alone)

    def check(self) -> None:
        """Compare each case."""
        wrong = []
        assert self.alone
        for name, alone in self.alone.items():
            try:
                self._check(name, alone, [worker[name] for worker in self.workers])
            except (AssertionError, KeyError) as error:
                wrong.append(f"{name}: {error}")
        assert not wrong, "\n".join(wrong)

    @staticmethod
    def _check(name: str, alone: dict[str, Any], workers: list[dict[str, Any]]) -> None:
        errors = [one["error"] for one in (alone, *workers) if "error" in one]
        assert not errors, errors[0]
        first, *others = workers
        for other in others:
            assert other["weights"] == first["weights"], "the workers' weights differ"
            assert other["history"] == first["history"], "the workers' histories differ"
        assert first["steps"] == alone["steps"], f"{first['steps']} steps, not {alone['steps']}"
        numbers = [*first["history"].values(), *first["evaluate"].values(), *first["weights"]]
        assert all(np.isfinite(np.asarray(one, float)).all() for one in numbers), "not finite"
        if alone["per_replica"]:
            return
        for mine, theirs in zip(first["weights"], alone["weights"], strict=True):
            assert_near(mine, theirs, alone["near"], "weights")
        for mine, theirs in zip(first["predict"], alone["predict"], strict=True):
            assert_near(mine, theirs, 10 * alone["near"], "predictions")
        for part in ("history", "evaluate"):
            assert first[part].keys() == alone[part].keys()
            for metric, value in alone[part].items():
                assert_near(first[part][metric], value, alone["near"], f"{part}: {metric}")


def test_common_models_get_the_numbers_of_one_process(tmp_path: Path) -> None:
    Trained(tmp_path, 2, f"{ROWS}:{','.join(SOME)}", f"{FEW_ROWS}:{','.join(OF_FEW_ROWS)}").check()


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "few_rows"), [(2, FEW_ROWS), (3, "4/3")])
def test_every_layer_optimizer_loss_and_metric_gets_the_numbers_of_one_process(
    tmp_path: Path, workers: int, few_rows: str
) -> None:
    Trained(tmp_path, workers, ROWS, few_rows).check()
