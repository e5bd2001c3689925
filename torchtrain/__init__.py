"""torchtrain: an LLM trainer that can prove its gradients. Nothing is re-exported here; import from the defining module."""
