"""The drop-in API for plain tensors, behind ``cp_dispatch/plain.py``."""
