"""Our side of the comparison of GRPO with images: `grpo_ours.py` with a model that sees.

    <python of this project's environment> benchmarks/vision_ours.py SPEC.json RESULT.json

`transformers`' own modules; everything is trained, as by TRL. Rows are padded, and each has its own copy of its group's image: packing and
shared prompts, which grpo_ours.py has, are not for rows with images.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from grpo_ours import make_algorithm, make_config, run, text_of, write_result
from trl_grpo_reference import Spec, fixed_batch, read_spec

from aligner.data.vision import ImageStore, Vision
from aligner.models.config import ModelConfig
from aligner.types import Images


def config_of(spec: Spec, folder: str):
    """The settings of the text comparison with a model that sees."""
    model = ModelConfig(
        path=spec.model, images=True, micro_batch_size=spec.micro_batch_size or len(spec.prompts) * spec.group_size, freeze=[]
    )
    return replace(make_config(spec, folder), model=model)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: vision_ours.py SPEC.json RESULT.json")
    spec, started = read_spec(Path(sys.argv[1])), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        vision = Vision(Path(spec.model), ImageStore(Path(folder) / "images"))
        rows = [Images.of([vision.add(Path(file).read_bytes())]) for file in spec.images]
        given = {
            "vision": vision,
            "extras": [{Images.name: row} for row in rows],
            "tokenizer": SimpleNamespace(end_ids=(-1,), missing_ids=lambda size: [spec.slot], vision=None, decode=text_of),
        }
        checked = {Images.name: Images(torch.stack(rows[: len(fixed_batch(spec)["prompts"])]))}
        result = run(spec, config_of(spec, folder), partial(make_algorithm, **given), checked)
    write_result(Path(sys.argv[2]), spec, result, started)


if __name__ == "__main__":
    main()
