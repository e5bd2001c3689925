"""The plugin fsdpturbo: experts first, sharded on a mesh of their own; the dense path ignores them."""
