"""Tests of the proxy, and what they and the benchmarks are made of."""

import os
import sys

# Containers often forbid it; then each process of the tests, and each that a test starts, would compile the
# proxy anew. It is here, so that the first import of the proxy follows.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
