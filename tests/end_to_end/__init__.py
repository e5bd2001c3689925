"""Whole runs from a job file to their exit code."""
