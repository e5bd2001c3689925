"""Tensor parallelism: matrices split over the tp axis, and with sequence parallel the activations between them too."""
