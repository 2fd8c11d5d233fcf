"""The roles on one machine: started, watched, ended, and shown."""
