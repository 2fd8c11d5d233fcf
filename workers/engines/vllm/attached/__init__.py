"""An existing vLLM server, by its URL."""
