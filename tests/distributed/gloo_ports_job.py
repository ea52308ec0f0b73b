"""One rank with many gloo groups: it prints its ports, its threads, what six collectives at once give, and how it ends."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from aligner.parallel import gloo, launch

world = launch.initialize("gloo", timeout_seconds=60, fingerprint="f", collective_timeout_seconds=60)
groups = [dist.new_group(list(range(world.world_size)), backend="gloo") for _ in range(6)]
tensors = [torch.full((50_000,), float(world.rank + number)) for number in range(len(groups))]
pending = [dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in zip(tensors, groups, strict=True)]
for work in pending:
    work.wait()
del pending, work
own = {os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{name}").is_symlink()}
lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
listening = [int(fields[1].rpartition(":")[2], 16) for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in own]
names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
threads = names.count("pt_gloo_runloop")
dist.barrier()
print(json.dumps({"sums": [tensor.unique().tolist() for tensor in tensors], "ports": listening, "threads": threads}), flush=True)
settle, destroy, order = gloo.settle, dist.destroy_process_group, []
gloo.settle = lambda timeout: (settle(timeout), order.append("settled"))
dist.destroy_process_group = lambda: (order.append("destroyed"), destroy())
launch.shutdown()
assert order == ["settled", "destroyed"], order
assert {tensor._use_count() for tensor in tensors} == {1}  # gloo's threads hold none of them
