"""The data of one rank: datasets and DataLoaders of the user, adapted, batched and prefetched."""
