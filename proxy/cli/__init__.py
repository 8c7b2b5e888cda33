"""The commands of `llama-prefix-cache`."""
