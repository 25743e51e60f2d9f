"""The calls on arrays: numpy's, DLPack's and what has the buffer protocol. Works without torch."""
