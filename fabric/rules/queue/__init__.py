"""Rules of runs and jobs."""
