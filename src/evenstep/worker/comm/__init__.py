"""How gradients travel: through memory that the processes of one machine share, where there is such."""
