"""Inference engines behind one protocol (base.py). An engine's library is imported only when that engine starts."""
