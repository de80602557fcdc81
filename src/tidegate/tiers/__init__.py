"""Where bytes live; knows bytes, not tensors."""
