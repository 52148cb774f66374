"""Any parallel layout, the same bits: what ranks exchange, and in which order they add it up (docs/scale.md)."""
