"""What an op means, and which backend computes it."""
