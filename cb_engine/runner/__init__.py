"""Everything that touches the device: the shadow module tree, the step's tensors, the forward, the KV tensors."""
