"""Who may use which slot, and what is done in it."""
