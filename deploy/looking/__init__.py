"""Commands that look at trajectories and at the past."""
