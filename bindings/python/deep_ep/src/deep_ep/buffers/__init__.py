"""The buffers of both generations of DeepEP."""
