"""Who computes how many tokens this step. Free of torch."""
