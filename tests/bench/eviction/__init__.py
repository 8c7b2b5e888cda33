"""Eviction against the optimum and against other policies, on recorded traces."""
