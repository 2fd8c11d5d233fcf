"""vLLM behind the engine protocol: in this process (AsyncLLM) or an existing server by URL.

Read engine.py first; engines/vllm/common/backend.py says what it asks of either. What runs inside vLLM's own
processes: plugin.py, engines/vllm/step/scheduler.py, engines/vllm/inplace/transfer.py. Nothing here imports vllm until
an engine starts.
"""
