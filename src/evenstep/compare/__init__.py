"""compare: strategies on this machine, in turn, and what would be faster."""
