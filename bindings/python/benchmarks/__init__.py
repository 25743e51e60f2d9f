"""What bench.py times, a module for each kind of run."""
