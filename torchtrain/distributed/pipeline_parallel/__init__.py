"""Pipeline parallelism: which layers a rank computes, and in which order micro-batches pass through them."""
