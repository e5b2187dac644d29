"""Training in a folder: the loop, what it writes, and what is read back."""
