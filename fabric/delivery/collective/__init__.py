"""The collective path: torch.distributed carries a version's encoded chunks from one publisher to many receivers."""
