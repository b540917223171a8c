"""Commands in the pages' text, and whether a wrong one is detected."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.docs.commands import faults_of
from tests.docs.reading import PAGES


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("make tset", "no target tset"),
        ("make soak HOURS=3", "no variable HOURS"),
        ('make bench ARGS="feed --twice"', "its options are others"),
        ("pip install '.[jave]'", "no extra jave"),
        ("python -m tfos_nb enable-monitor", "no command enable-monitor"),
        ("python -m tfos_nb.demo --copies .", "no option --copies"),
        ("spark-submit --archive tf.tar.gz program.py", "no option --archive"),
        ("python notebooks/examples/mnist.py --epoch-count 3", "no option --epoch-count"),
        ("maek demo", "an unknown command"),
    ],
)
def test_a_wrong_command_is_detected(command: str, fault: str) -> None:
    assert faults_of(command) == [f"{' '.join(shlex.split(command))}: {fault}"]


def test_commands_within_the_text_exist() -> None:
    command = re.compile(r"`((?:make|python -m tfos_nb) [^`]+)`")
    written = [text for page in PAGES.values() for text in command.findall(page.read_text(encoding="utf-8"))]
    assert len(written) > 10
    assert [fault for text in written for fault in faults_of(text)] == []
