"""The calls that the rest of the system may make of a broker."""
