"""Exit codes. No imports: the command line reads this before anything else."""

INTERRUPTED = 130  # as shells have it: 128 and the number of SIGINT
