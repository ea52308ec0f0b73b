"""aligner: LLM alignment for Slurm and MPI supercomputers on Megatron-Core."""

__version__ = "0.1.0"

# What code outside may build on; the site's reference documents these packages. None is imported before it is asked for.
__all__ = ["__version__", "data", "losses", "protocols", "rewards", "rollout", "servers", "types"]
