"""One search over many devices: trials are ordinary runs, compared at rungs; the best go on from their checkpoints."""
