"""Models as Megatron-LM (`torch_dist` checkpoints) and NeMo (`.nemo` archives with distributed checkpoints) write them, read in place.

`tensors` opens a directory or an archive and reads tensors from it, `settings` reads what kind of model it is, `model` puts them
together. No pickle is executed, nothing is unpacked, and a tensor or setting that is not understood is refused by name.
"""
