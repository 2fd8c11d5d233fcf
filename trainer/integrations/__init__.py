"""Adapters between rollfab's client and trainers of others. Importing one costs nothing but numpy;
`verl_weights` alone imports verl, and registers itself there.

Each is tested against the real package, in an environment of its own: docs/trl.md, docs/verl.md.
"""
