"""zmrl: reinforcement learning whose rollouts and trainer agree bit for bit."""

import os

# Several processes share the cores, so idle OpenMP threads must sleep: spinning, the default, made two threads on two
# busy cores four times slower than one. libgomp, which torch brings and the kernels share, reads this when torch is
# imported; processes that are started later inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

__version__ = "0.1.0"
