"""The text side of Qwen3.5 with experts: gated delta nets, every few layers gated attention, experts everywhere."""
