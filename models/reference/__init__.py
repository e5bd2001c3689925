"""Oracles: plain torch, nothing of ours, written for reading."""
