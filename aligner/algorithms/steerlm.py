"""SteerLM (Dong et al. 2023, 2310.05344): supervised fine-tuning on conversations whose turns carry labels, which
`aligner.data.supervised` reads. What is learnt is in the data; the recipe is that of `sft.py`.
"""

from __future__ import annotations

from dataclasses import replace

from aligner.algorithms import sft

RECIPE = replace(sft.RECIPE, name="steerlm")
