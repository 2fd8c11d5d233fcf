"""Inside vLLM's EngineCore: what each step asks and tells."""
