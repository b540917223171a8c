"""All executors are killed at once: the training continues within the epoch, from the state in the ``model_dir``."""

from __future__ import annotations

import re

import pytest

from tests.conftest import RunScript
from tests.end_to_end.executors import trained


@pytest.mark.parametrize("shuffle", [0, pytest.param(300, marks=pytest.mark.faults)])
def test_a_fit_whose_nodes_are_all_lost_at_once_continues_within_its_epoch(run_script: RunScript, shuffle: int) -> None:
    calls = f"""
        train("all", ["worker:0", "worker:1"], signal.SIGKILL, after=40, with_nodes=True, shuffle={shuffle},
              checkpoint_every=0.5)
    """
    (told,) = trained(run_script, calls, 3, {})
    found = re.fullmatch(r"all gone [01] restarts left 3 epochs sum right (\d+) repeated 150 steps .*", told)
    assert found, told
    assert 0 < int(found[1]) <= 40, "from the epoch's beginning they would be more than 40"
