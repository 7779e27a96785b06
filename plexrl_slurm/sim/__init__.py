"""The scheduler without a cluster: the daemon's own core, driven by a trace."""
