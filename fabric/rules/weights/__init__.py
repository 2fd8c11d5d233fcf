"""Rules of versions: chains, publishers, carriers, and who fetches from whom."""
