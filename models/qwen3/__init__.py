"""The dense Qwen3 family: Llama's parts with norms of queries and keys and a head size of its own."""
