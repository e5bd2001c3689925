"""Context parallelism: each rank holds a share of every sequence's tokens, and attention still sees all of them."""
