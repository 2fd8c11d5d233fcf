"""The guard: what may run beside a serving engine now."""
