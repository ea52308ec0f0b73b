"""`aligner generate MODEL --input FILE --output FILE`, which is killed when it has written 5 responses."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from aligner.commands import generate
from aligner.commands.parts import GenerateOptions

_record, _count = generate._record, iter(range(5))


def dies(*arguments):
    if next(_count, None) is None:
        os._exit(9)
    return _record(*arguments)


generate._record = dies
model, prompts, output = sys.argv[1:]
options = GenerateOptions(input=Path(prompts), output=Path(output), samples=3, temperature=1.0, seed=5, max_tokens=24)
generate.generate(model, [], options)
