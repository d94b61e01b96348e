"""Training of EAGLE-3 heads: what a target says, what it computes meanwhile, and how a head learns to foresee it."""
