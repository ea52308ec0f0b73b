"""Runs the tests of all model families and writes what passed into docs/models.md, a row for each family.

usage: python tests/model_table.py [JUNIT_XML]    (with a file: of a run of both tiers)

Columns are tests; a cell counts the family's models of `hf_models.py` that a test passed with, of those that it ran with.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "distributed")]

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- table: tests/model_table.py -->", "<!-- end of table -->"
COLUMNS = {  # heading: the test, and what selects it
    "Logits, both ways": ("tests/unit/models/test_hf_parity.py", r"test_logits_equal_transformers_both_ways\[(.+)\]"),
    "Greedy tokens": ("tests/unit/rollout/test_engine.py", r"test_greedy.*transformers.*\[(.+)\]"),
    "Log-probs": ("tests/unit/rollout/test_engine.py", r"test_logprobs_equal_recomputed_ones\[(.+)\]"),
    "Adapters": ("tests/unit/models/test_lora.py", r"test_merged_and_peft_exports_give_the_same_logits\[(.+)\]"),
    "Layouts": ("tests/distributed/test_family_layouts.py", r"test_a_layout(.+)"),
    "Plan": ("tests/distributed/test_family_plans.py", r"test_a_layer_of_every_family_is_planned()"),
}


def run(report: Path) -> None:
    files = sorted({file for file, _ in COLUMNS.values()})
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", f"--junitxml={report}", *files], cwd=ROOT, check=False
    )


def models_of(heading: str, case: str) -> list[str]:
    """The models that a case of a column's test is about; a layout's and the plan's go through several."""
    import test_family_layouts as layouts
    from hf_models import HF_MODELS

    if heading == "Plan":
        return list(HF_MODELS)
    if heading == "Layouts":
        return layouts.MIXTURES if "_of_mixtures_" in case else layouts.VARIANTS if "_of_variants_" in case else layouts.NAMES
    return [name for name in case.split("-") if name in HF_MODELS]


def results(report: Path) -> dict[tuple[str, str], list[bool]]:
    """Whether each test passed, by heading and model."""
    found = defaultdict(list)
    for one in ElementTree.parse(report).iter("testcase"):
        for heading, (file, pattern) in COLUMNS.items():
            match = re.fullmatch(pattern, one.get("name", ""))
            if match is None or not one.get("classname", "").endswith(Path(file).stem) or one.find("skipped") is not None:
                continue
            passed = one.find("failure") is None and one.find("error") is None
            for model in models_of(heading, match[1]):
                found[heading, model].append(passed)
    return found


def table(found: dict[tuple[str, str], list[bool]]) -> str:
    from hf_models import HF_MODELS

    from aligner.models.config import Family

    lines = [f"| `model_type` | Models | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for family in Family:
        models = [name for name, fields in HF_MODELS.items() if fields["model_type"] == family.value]
        cells = []
        for heading in COLUMNS:
            tried = [found[heading, name] for name in models if found.get((heading, name))]
            passed = sum(all(one) for one in tried)
            cells.append(f"{passed} of {len(tried)}" if tried else "-")
        lines.append(f"| {family.value} | {len(models)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(folder) / "report.xml"
        if len(sys.argv) == 1:
            run(report)
        text = PAGE.read_text()
        start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
        PAGE.write_text(f"{text[:start]}\n\n{table(results(report))}\n\n{text[end:]}")


if __name__ == "__main__":
    main()
