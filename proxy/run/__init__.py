"""llama-server as a process of our own."""
