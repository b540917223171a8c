"""A control group's memory, as both versions of the kernel's interface give it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfos_nb.runtime.host.memory import ControlGroup, Memory

GIB = 1 << 30


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def of_version_1(folder: Path, limit: int) -> None:
    group(
        folder,
        memory__limit_in_bytes=f"{limit}\n",
        memory__usage_in_bytes=f"{2 * GIB}\n",
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
        memory__stat=f"cache 1\ntotal_inactive_file {GIB}\n",
    )


def of_version_2(folder: Path, limit: str) -> None:
    group(
        folder,
        memory__max=f"{limit}\n",
        memory__current=f"{2 * GIB}\n",
        memory__events="low 0\noom 4\noom_kill 3\n",
        memory__stat=f"anon 1\ninactive_file {GIB}\n",
    )


def own(root: Path, membership: str) -> ControlGroup | None:
    (root / "membership").write_text(membership)
    return ControlGroup.own(root, root / "membership")


@pytest.mark.parametrize("inside", ["kubepods/pod1/c1", ""], ids=["on-the-host", "in-a-container"])
@pytest.mark.parametrize("version", [1, 2])
def test_limit_use_and_kills_are_read_of_the_processs_own_group(tmp_path: Path, inside: str, version: int) -> None:
    """A container's group is mounted at the root, while the kernel may still name it by the host's folders."""
    if version == 1:
        of_version_1(tmp_path / "memory" / inside, 4 * GIB)
        membership = "5:cpuset:/\n4:memory:/kubepods/pod1/c1\n0::/\n"
    else:
        of_version_2(tmp_path / inside, str(4 * GIB))
        membership = "0::/kubepods/pod1/c1\n"
    assert own(tmp_path, membership) == ControlGroup(limit=4 * GIB, used=GIB, kills=3)


def test_a_group_without_a_limit_is_none(tmp_path: Path) -> None:
    of_version_1(tmp_path / "memory", 9223372036854771712)
    assert own(tmp_path, "4:memory:/\n") is None
    of_version_2(tmp_path / "two", "max")
    assert own(tmp_path, "0::/two\n") is None


def test_without_groups_it_is_none(tmp_path: Path) -> None:
    assert own(tmp_path, "") is None
    assert ControlGroup.own(tmp_path, tmp_path / "nothing") is None


def test_the_figures_are_those_of_the_machine_or_of_the_group() -> None:
    memory = Memory.now()
    assert 0 <= memory.free <= memory.total
