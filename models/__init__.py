"""The model zoo: one folder per family, and ``models.reference``, the oracle that shares no code with them."""
