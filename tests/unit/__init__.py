"""One process, no process group; mirrors the source tree."""
