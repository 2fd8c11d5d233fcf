"""Steps of the acceptance run that are no tests: each module is a process, run by run.py."""
