"""Before the cluster: memory and time of a job, from real shards on fake tensors and from the hardware's published figures."""
