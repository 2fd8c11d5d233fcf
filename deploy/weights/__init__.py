"""`rollfab weights`: looking at published weights, and healing them."""
