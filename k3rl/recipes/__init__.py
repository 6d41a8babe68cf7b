"""Whole jobs. Each recipe reads from top to bottom like the algorithm that it is."""
