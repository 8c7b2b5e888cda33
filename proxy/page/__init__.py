"""The live page of the admin listener: its files, and what keeps it up to date."""
