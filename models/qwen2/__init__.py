"""The Qwen2 family: Llama's parts with biases on queries, keys and values."""
