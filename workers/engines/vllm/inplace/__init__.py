"""Weights written in place in vLLM's worker processes."""
