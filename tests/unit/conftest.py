"""Hypothesis: few examples and no deadline, so that a busy machine does not fail a test."""

from hypothesis import settings

settings.register_profile("fast", max_examples=80, deadline=None)
settings.load_profile("fast")
