"""One request served by one llama-server process: its prompt, its plan, its slot, its save."""
