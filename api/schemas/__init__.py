"""What the api answers, as models."""
