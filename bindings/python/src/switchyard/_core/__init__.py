"""Groups of ranks and their operations on raw memory: the shared library, and what it asks."""
