"""One role per process: what each command starts, and with which engine."""
