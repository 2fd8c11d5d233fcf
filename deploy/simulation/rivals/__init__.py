"""Other people's rules, as we read what they published: who takes which turn, who borrows, what a step is."""
