"""From logits to token losses, on one device."""
