"""The decoder's kernels for CPUs, in C: compiled once on each kind of machine at their first use, and loaded with ctypes."""
