"""Runs, groups, trajectories, turns and leases on the broker: keys, scripts, and every port of the queue."""
