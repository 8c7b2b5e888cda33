"""What people are shown of the store and of recent requests."""
