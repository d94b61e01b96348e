"""Grammar-constrained decoding: compiled grammars, each request's place in its own, and the masks of a step.

The grammars themselves are llguidance's. Nothing here imports it before a request asks for structured output.
"""
