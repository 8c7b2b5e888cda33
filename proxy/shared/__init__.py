"""The shared store: a second tier of states, which other machines can reach too."""
