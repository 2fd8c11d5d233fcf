"""The routes by what they need: nothing (health, page), the right to read (read, events), the right to control."""
