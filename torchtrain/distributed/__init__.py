"""Many devices: who stands where, and who holds which part of which parameter."""
