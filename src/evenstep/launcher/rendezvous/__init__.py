"""How the processes of a run find each other: on one machine, over the network, under Slurm or torchrun."""
