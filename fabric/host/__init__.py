"""This machine: its directories, its processes, and what is installed."""
