"""What a run reports about itself, and where it goes."""
