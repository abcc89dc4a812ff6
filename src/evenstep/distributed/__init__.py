"""This process's rank and devices, and what all ranks do together."""
