"""What the rest of the system may ask of a broker."""
