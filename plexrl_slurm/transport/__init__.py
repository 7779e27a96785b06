"""Links between the daemon and its agents, and between an agent and its ranks."""
