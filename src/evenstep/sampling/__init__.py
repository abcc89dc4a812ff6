"""The order of samples and random numbers as pure functions of seed, epoch and position; importable without torch."""
