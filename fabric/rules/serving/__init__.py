"""Rules beside a serving engine: what may run in the next step."""
