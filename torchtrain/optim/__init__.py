"""Optimizers from the job, the learning rate over time, and the scale of fp16 losses."""
