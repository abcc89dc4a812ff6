"""Pages: one HTML file that needs nothing else, and a live page of one run."""
