"""Optimizer, schedule and loss scaler."""
