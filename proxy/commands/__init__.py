"""The commands of `llama-prefix-cache`, one module each."""
