"""aligner: LLM alignment for Slurm and MPI supercomputers on Megatron-Core."""

__version__ = "0.1.0"
