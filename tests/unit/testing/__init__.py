"""The rank pool and the comparisons themselves."""
