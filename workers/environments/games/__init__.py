"""The games that come with it."""
