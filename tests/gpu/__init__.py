"""What only a real device shows; skipped where there is none."""
