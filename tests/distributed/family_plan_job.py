"""Plans a layer of models of `hf_models` on two tensor-parallel ranks, on fake tensors.

usage: family_plan_job.py OUTPUT NAME...    (a JSON object: by model the bytes that a layer keeps, and the elements of a rank's weights)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    from hf_models import HF_MODELS, SIZES
    from transformers import AutoConfig

    from aligner.models.config import Dtype, ModelConfig
    from aligner.models.families import architecture_from_hf
    from aligner.models.training.optimizer import OptimizerConfig
    from aligner.parallel.topology import ParallelConfig
    from aligner.planner import dry_run
    from aligner.planner.config import Device
    from aligner.planner.workload import Component, Head, Phase, Work

    found = {}
    for name in sys.argv[2:]:
        config = json.loads(AutoConfig.for_model(**(SIZES | HF_MODELS[name])).to_json_string(use_diff=False))
        component = Component(
            name="trainer",
            head=Head.language,
            num_ranks=2,
            architecture=architecture_from_hf(config),
            model=ModelConfig(dtype=Dtype.bfloat16),
            parallel=ParallelConfig(tp=2, sequence_parallel=True, etp=2 if "experts" in str(config) else 1),
            optimizer=OptimizerConfig(),
            work=Work(phases=(Phase.train,), rows=8, length=64, response_length=32, update_rows=8, num_updates=1),
        )
        kept = [dry_run.measure_block(component, 2, 64, device).layer for device in (Device.cpu, Device.gpu)]
        found[name] = [*kept, sum(one.numel for part in dry_run.shard_parameters(component, 0) for one in part)]
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
