"""Recorded serving load, sent to a real server again: traces, how they are scaled, the client, what it measured.

Read `traces` → `scale` → `client` → `report`. Only `client` needs aiohttp.
"""
