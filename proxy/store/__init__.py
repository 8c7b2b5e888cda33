"""The checkpoints of one directory: index, state files, records, and their budget."""
