"""What one rank reads: the user's data adapted, batched, prefetched."""
