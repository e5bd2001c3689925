"""Tasks: what is learned from a batch. A task knows nothing of ranks."""
