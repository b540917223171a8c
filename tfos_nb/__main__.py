"""``python -m tfos_nb``: what is set up once for a user, outside a notebook."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tfos_nb import kubernetes
from tfos_nb.errors import TfosError
from tfos_nb.spark import monitor

_COMMANDS: dict[str, tuple[Callable[[Path], str], str]] = {
    "enable-sparkmonitor": (monitor.enable, "let the kernels of an IPython profile load sparkmonitor"),
    "disable-sparkmonitor": (monitor.disable, "take that back"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Do what is asked for; 1 if it cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m tfos_nb", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, told) in _COMMANDS.items():
        command = commands.add_parser(name, help=told, description=told)
        command.add_argument("--profile", default="default", help="the IPython profile (default: default)")
    of_kubernetes = commands.add_parser("kubernetes", help="write the manifests of a notebook on Kubernetes")
    actions = of_kubernetes.add_subparsers(dest="action", metavar="ACTION", required=True)
    told = "Write the manifests with your values, for kubectl apply -f -; docs/kubernetes.md explains them."
    kubernetes.add_options(actions.add_parser("render", help="print them as YAML", description=told))
    asked = parser.parse_args(argv)
    if asked.command == "kubernetes":
        return _render(asked)
    if asked.command == "enable-sparkmonitor" and not monitor.is_installed():
        return _fail(f"sparkmonitor is not installed: {sys.executable} -m pip install sparkmonitor")
    if not asked.profile or Path(asked.profile).name != asked.profile:
        return _fail(f"--profile {asked.profile}: the name of a profile, as in ipython --profile=NAME")
    from IPython.paths import get_ipython_dir  # here, since --help needs no IPython

    try:
        done = _COMMANDS[asked.command][0](Path(get_ipython_dir(), f"profile_{asked.profile}"))
    except (OSError, UnicodeError) as error:
        return _fail(str(error))
    sys.stdout.write(f"{done}\n")
    return 0


def _render(asked: argparse.Namespace) -> int:
    try:
        sys.stdout.write(kubernetes.render(kubernetes.values_of(asked)))
    except TfosError as error:
        return _fail(str(error))
    return 0


def _fail(text: str) -> int:
    sys.stderr.write(f"{text}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
