"""A persistent, token-exact prefix cache in front of an unmodified llama-server."""

__version__ = "0.1.0"
