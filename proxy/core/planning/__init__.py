"""What to do with one request: which slot, from which state, with which stops on the way."""
