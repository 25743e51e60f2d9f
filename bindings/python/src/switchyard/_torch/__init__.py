"""The calls on torch tensors, on the host and on GPUs, and the backend of torch.distributed. Imported only where torch is."""
