"""Run the fuzz tests with new inputs for a time: ``make fuzz MINUTES=10``, or ``python -m tests.fuzz --minutes 10``.

The tests run with the profile ``fuzz``, in rounds with new inputs, until the time is over or a test fails. Then pytest
prints the smallest input that fails. If atheris is installed, it gets a fifth of the time. Other arguments are
pytest's.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import time
from pathlib import Path

_FOR_ATHERIS = 0.2


def main() -> int:
    """Run until the time is over; return 0 if all tests passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Send new nonsense, for so many minutes.")
    parser.add_argument("--minutes", type=float, default=10.0)
    known, for_pytest = parser.parse_known_args()
    until = time.monotonic() + 60 * known.minutes
    if importlib.util.find_spec("atheris") is not None:
        seconds = int(60 * known.minutes * _FOR_ATHERIS)
        led = [sys.executable, "-m", "tests.fuzz.atheris_wire", f"-max_total_time={seconds}", "-max_len=4096"]
        if code := subprocess.run(led, check=False).returncode:
            return code
    else:
        print("atheris is not installed (pip install atheris): no inputs that are led by the code they reach")
    tests = [sys.executable, "-m", "pytest", "-q", str(Path(__file__).parent), "--hypothesis-profile=fuzz", *for_pytest]
    rounds = 0
    while not rounds or time.monotonic() < until:
        if code := subprocess.run(tests, check=False).returncode:
            return code
        rounds += 1
    print(f"{rounds} rounds, and all of them held")
    return 0


if __name__ == "__main__":
    sys.exit(main())
