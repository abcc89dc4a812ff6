"""What is watched while a training runs, and what is known about errors."""
