"""Tests are packages, so that the rank pool imports a test module under the name pytest gave it."""
