"""The embedded engine: the transformers library on a CPU or one GPU."""
