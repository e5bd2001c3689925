"""The job: what a run is, read once, checked whole, frozen. Imports no torch."""
