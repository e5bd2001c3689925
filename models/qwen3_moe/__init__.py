"""The Qwen3 family with experts: a softmax router, a few experts a token, dense layers where the sizes say so."""
