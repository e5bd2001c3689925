"""Checkpoint folders and their metadata, without ranks."""
