"""Single-device parts that every family is built from. Knows nothing of ranks."""
