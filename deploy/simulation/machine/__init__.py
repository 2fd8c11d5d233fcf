"""What is simulated, one machine at a time: time, work, engines, their cost, and the books on them."""
