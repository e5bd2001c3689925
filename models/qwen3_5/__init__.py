"""The dense text side of Qwen3.5: gated delta nets, every few layers gated attention, feed-forward layers."""
