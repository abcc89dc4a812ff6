"""evenstep where a scheduler places the processes: files for Kubernetes and Slurm, and runs on Ray."""
