"""zmrl: reinforcement learning whose rollouts and trainer agree bit for bit."""

__version__ = "0.1.0"
