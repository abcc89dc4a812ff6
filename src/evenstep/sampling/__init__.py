"""Which sample goes where, in which order, and the random numbers that decide it: pure functions, no torch."""
