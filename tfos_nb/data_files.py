"""Find files that come with the package, such as the quickstart: pip puts them outside of it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from pathlib import Path

__all__ = ["find_data_file"]


def find_data_file(place: Path) -> Path | None:
    """Return where a file is that has this place in a checkout; None if it is not there.

    It is where pip has put it, or in the checkout of this module: an editable install lists no data files.

    Examples
    --------
    >>> find_data_file(Path("notebooks/no such notebook.ipynb")) is None
    True
    """
    found: list[Path] = []
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        installed = importlib.metadata.files("tfos_nb") or ()
        found += [Path(os.path.normpath(file.locate())) for file in installed if file.name == place.name]
    found.append(Path(__file__).resolve().parents[1] / place)
    return next((path for path in found if path.is_file()), None)
