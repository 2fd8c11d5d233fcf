"""What this machine has of what the roles need."""
