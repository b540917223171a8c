"""Run the checks of ``%tfos_doctor``, each in its own thread with a deadline, so that none can block the cell."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tfos_nb.magics.diagnosis.report import Finding

__all__ = ["Check", "examine"]

Look = Callable[[], Sequence[Finding]]


@dataclass(frozen=True)
class Check:
    """A check: its name, its function, and its time limit in seconds."""

    what: str
    look: Look
    seconds: float = 5.0


class _Examination:
    """One running check, in its own thread."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._findings: Sequence[Finding] | None = None
        self._deadline = time.monotonic() + check.seconds
        self._over = threading.Event()
        threading.Thread(target=self._run, name=f"tfos-doctor {check.what}", daemon=True).start()

    def _run(self) -> None:
        try:
            self._findings = self._check.look()
        except Exception as error:  # noqa: BLE001 - a check that fails is a finding
            told = f"it could not be checked: {type(error).__name__}: {error}".splitlines()[0]
            self._findings = [Finding(self._check.what, "warn", told)]
        finally:
            self._over.set()

    def findings(self) -> Sequence[Finding]:
        """Wait for the check until its deadline, and return its findings."""
        self._over.wait(max(0.0, self._deadline - time.monotonic()))
        if self._findings is None:
            told = f"no answer within {self._check.seconds:g} s"
            return [Finding(self._check.what, "warn", told)]
        return self._findings


def examine(checks: Sequence[Check]) -> list[Finding]:
    """Run all checks at the same time; return the findings in the order of the checks."""
    running = [_Examination(check) for check in checks]
    return [finding for one in running for finding in one.findings()]
