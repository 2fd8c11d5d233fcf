"""The rollout worker: pulls turns under a lease, and runs them on an engine."""
