"""Every topology against one rank, and the models against references."""
