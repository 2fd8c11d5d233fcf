"""Looking at a fabric from outside: why runs stand, and whether published weights are right."""
