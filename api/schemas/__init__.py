"""The api's answers, as models."""
