"""Parts of the throughput benchmark: what is run, by which engine, measured how, printed how."""
