"""What the api answers with: read from the broker once for all who ask, and made into models."""
