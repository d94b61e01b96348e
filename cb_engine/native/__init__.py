"""The CPU attention kernel in C++: its sources, the loader that compiles them on first use, a benchmark.

Owns: the operator `torch.ops.cb_engine.paged_attention`. Does not know: `AttentionBackend` (see
`cb_engine.attention.native_backend`), models, requests.
"""
