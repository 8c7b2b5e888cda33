"""llama-server as it is: its routes, bodies, answers, flags and state files."""
