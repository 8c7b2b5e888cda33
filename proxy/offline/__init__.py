"""Work on the directory of a store that no proxy uses."""
