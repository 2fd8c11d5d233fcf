"""Adapters between rollfab's client and trainers of others. Importing one costs nothing but numpy.

Each is tested against the real package, in an environment of its own: docs/trl.md.
"""
