"""The common words of all processes: records, their binary form, errors, names, bounds, and the clock."""
