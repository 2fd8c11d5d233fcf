"""What travels and what it is called: records, their binary form, errors, names, bounds, and the clock."""
