"""One rank of a job that only starts: initialises, sums the ranks, prints its place. Arguments: fingerprint, timeout in seconds."""

import os
import sys

import torch

from aligner.errors import LaunchError
from aligner.parallel import launch
from aligner.parallel.collectives import all_ranks


def main() -> int:
    fingerprint, timeout = sys.argv[1], float(sys.argv[2])
    # "by-rank" makes the ranks disagree.
    if fingerprint == "by-rank":
        fingerprint = "rank-" + os.environ["RANK"]
    try:
        world = launch.initialize("gloo", timeout_seconds=timeout, fingerprint=fingerprint)
    except LaunchError as error:
        print(f"LaunchError: {error}", flush=True)
        return 3
    total = torch.tensor([world.rank])
    torch.distributed.all_reduce(total)
    agreements = [all_ranks(condition, torch.device("cpu")) for condition in (True, world.rank == 0, False)]
    assert agreements == [True, world.world_size == 1, False], agreements
    place = f"rank={world.rank}/{world.world_size} local={world.local_rank}/{world.local_world_size}"
    print(f"{place} source={world.source.value} sum={total.item()}", flush=True)
    launch.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
