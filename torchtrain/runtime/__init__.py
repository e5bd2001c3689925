"""The machine under a run: environment, device, logging, seeds, signals and garbage collection."""
