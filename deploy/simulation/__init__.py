"""`rollfab sim`: a cluster under production's rules, simulated beside other ways to run it (docs/simulation.md)."""
