"""How one model is distributed over a World: one file for each strategy."""
