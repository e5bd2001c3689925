"""Expert parallelism: each rank has some of the experts, and tokens travel to them."""
