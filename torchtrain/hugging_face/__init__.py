"""How families look in Hugging Face's checkpoints: names and config files as data. Reads no file; no torch."""
