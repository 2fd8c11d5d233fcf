"""The acceptance run on GPUs: what to bring to a bare machine (pack), and what to run there (run). See docs/gpu.md."""
