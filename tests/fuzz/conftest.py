"""Profiles of hypothesis: the same few inputs in every `make test`, and new ones all the time in `make fuzz`."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("fuzz", max_examples=500, deadline=None, derandomize=False, print_blob=True)
