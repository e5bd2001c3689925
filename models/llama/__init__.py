"""The Llama family: RMSNorm, rotary positions with Llama-3 scaling, grouped-query attention, SwiGLU."""
