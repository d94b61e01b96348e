"""The CPU kernels in C++: their sources, and the loader that compiles them on first use.

Owns: the operators `torch.ops.cb_engine.*` for paged attention (`paged_attention.cpp`), dense layers (`dense.cpp`) and
sampling (`sampling.cpp`). Does not know: models, requests, or who calls them.
"""
