"""What a model is called, what its presets are, and how its text becomes ids."""
