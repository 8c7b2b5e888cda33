"""A generation request from its arrival to its answer."""
