"""Training on the memory you have."""
