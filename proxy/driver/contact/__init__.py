"""A llama-server process: found, identified, measured, followed and remembered."""
