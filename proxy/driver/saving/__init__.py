"""From a slot to a file: when, where to, and what of it is kept."""
