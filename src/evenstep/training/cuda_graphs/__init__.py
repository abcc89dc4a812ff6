"""Steps captured as CUDA graphs and replayed: choosing, capturing, checking."""
