"""Weights on their way: one fetch per node, a tree of nodes and regions, and snapshots from a peer's live weights."""
