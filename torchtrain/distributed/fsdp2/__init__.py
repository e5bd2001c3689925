"""The FSDP2Manager and the sibling files that read its plan; every policy is a file of its own."""
