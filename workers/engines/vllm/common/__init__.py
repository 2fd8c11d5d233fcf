"""What every way to a vLLM shares: the backend protocol, settings, logs and memory."""
