"""Publishing weights: whole, from a GPU, and by ranks."""
