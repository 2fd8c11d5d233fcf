"""Weights on their way: one fetch per node, a tree of nodes and regions, and copies of a peer's live weights."""
