"""Engines: what computes. They know no queue, no database, no Slurm; only ranks import them."""
