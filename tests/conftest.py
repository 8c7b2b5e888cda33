"""Hypothesis: few examples by default, many in `make test-long`; no deadline, for machines are busy."""

from hypothesis import settings

settings.register_profile("quick", max_examples=40, deadline=None)
settings.register_profile("long", max_examples=600, deadline=None)
settings.load_profile("quick")
