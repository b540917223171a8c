"""The magics: ``%load_ext tfos_nb`` comes here."""

from __future__ import annotations

from IPython.core.interactiveshell import InteractiveShell

from tfos_nb.magics.cluster import TfosMagics

__all__ = ["load", "unload"]


def load(ipython: InteractiveShell) -> None:
    """Register the magics with a shell. Loading them again replaces them."""
    ipython.register_magics(TfosMagics(ipython))


def unload(ipython: InteractiveShell) -> None:
    """Take the magics away again; clusters that run go on."""
    for kind, names in TfosMagics.magics.items():
        for name in names:
            ipython.magics_manager.magics[kind].pop(name, None)
    ipython.magics_manager.registry.pop(TfosMagics.__name__, None)
