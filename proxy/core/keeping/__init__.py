"""Which states are worth a file, which may replace each other, and which go first."""
