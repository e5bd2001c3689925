"""Real ranks over gloo, through the rank pool."""
