"""An engine's HTTP, as trainers speak it to one server, over fabric/ports/inference.py: vLLM's and SGLang's routes."""
