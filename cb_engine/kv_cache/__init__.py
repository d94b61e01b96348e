"""Paged KV cache bookkeeping, free of torch: which blocks exist, who holds them, what they contain."""
