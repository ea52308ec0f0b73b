"""One rank with many gloo groups: it prints how many ports it listens on, and what six collectives at once give."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from aligner.parallel import launch

world = launch.initialize("gloo", timeout_seconds=60, fingerprint="f", collective_timeout_seconds=60)
groups = [dist.new_group(list(range(world.world_size)), backend="gloo") for _ in range(6)]
tensors = [torch.full((50_000,), float(world.rank + number)) for number in range(len(groups))]
pending = [dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in zip(tensors, groups, strict=True)]
for work in pending:
    work.wait()
own = {os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{name}").is_symlink()}
lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
listening = [int(fields[1].rpartition(":")[2], 16) for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in own]
dist.barrier()
print(json.dumps({"sums": [tensor.unique().tolist() for tensor in tensors], "ports": listening}), flush=True)
for group in groups:
    dist.destroy_process_group(group)
launch.shutdown()
