"""What answers at a URL instead of a llama-server: something that starts one for each model."""
