"""llama-servers: found, identified, measured, followed; one, several, or the models of a host."""
