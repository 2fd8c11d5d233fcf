"""The agent worker: drives environments, and asks for turns."""
