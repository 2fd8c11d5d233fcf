"""The reward worker: scores finished rollouts, and keeps house."""
