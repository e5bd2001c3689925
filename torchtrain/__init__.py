"""An LLM trainer that can prove its gradients. Nothing is re-exported: import from the defining module."""
