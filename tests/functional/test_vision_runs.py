"""The path of `make demo-vision`, smaller: a folder of images, SFT, GRPO in one part and in two, and PPO with servers that see too."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from builders import load_module
from PIL import Image
from resumed_runs import in_two_parts
from training_jobs import ROOT, launcher, metrics_of, read_rows, run_aligner, run_job, series, train, write_rows

from aligner.algorithms.grpo import TrainGRPO
from aligner.algorithms.sft import TrainSFT
from aligner.reporting.run_view import RunView
from aligner.settings.compose import compose

pytestmark = pytest.mark.timeout(600)
FEW = ["loop.max_steps=2", "logging.tensorboard=false", "checkpoint.asynchronous=false"]
STEP = ["algorithm.prompts_per_step=4", "algorithm.group_size=4", "algorithm.mini_batch_size=16", "data.num_validation_prompts=6"]


@pytest.fixture(scope="module")
def digits() -> Any:
    return load_module(ROOT / "examples" / "vision" / "digits.py", "vision_digits")


@pytest.fixture(scope="module")
def folder(digits: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the demo writes, of drawn digits: pictures and questions in data/, a model in model/, and a short SFT run in sft/."""
    folder = tmp_path_factory.mktemp("vision")
    rng = np.random.default_rng(0)
    drawn = digits.Digits(images=rng.integers(0, 256, (40, 8, 8), dtype=np.uint8), labels=np.arange(40) % 10)
    files = digits.write_data(1, folder / "data", drawn, digits.Task(num_sft=24, num_prompts=16, num_validation=6))
    digits.write_model(1, folder / "model")
    run_job(train("sft"), folder / "sft", ["+experiment=vision", f"model.path={folder / 'model'}", f"data.train={files.sft}", *FEW])
    return folder


@pytest.fixture(scope="module")
def grpo(folder: Path) -> Path:
    """A GRPO run in one part, found equal to one that went on after its first step."""
    data = folder / "data"
    own = ["+experiment=vision", f"model.path={folder / 'sft' / 'export'}", f"data.train={data / 'prompts.jsonl'}", *FEW, *STEP]
    starts = ["reward.function.path=aligner.rewards.builtin:starts_with", "+reward.function.arguments.target='1+'"]  # something to learn
    own += [f"data.validation={data / 'validation.jsonl'}", "loop.validate_every=1", *starts, "optimizer.decay_steps=4"]
    whole, _, said = in_two_parts("grpo", folder, own, first=1, last=2)
    assert "llava: transformers' own modules" in said
    return whole


def test_it_samples_what_it_trains(grpo: Path) -> None:
    assert max(line.values["rollout/logprob_gap"] for line in metrics_of(grpo)[1:]) < 1e-5  # the first is a validation
    assert all("<image>" not in row["response"] for file in (grpo / "rollouts").iterdir() for row in read_rows(file))


def test_its_samples_and_report_have_the_pictures(grpo: Path, folder: Path) -> None:
    rows = read_rows(grpo / "validation" / "step_000000.jsonl")
    assert [row["prompt"] for row in rows] == ["<|user|><image>What is their sum?<|end|><|assistant|>"] * 6
    stored = [(grpo / "images" / row["images"][0]).read_bytes() for row in rows]
    assert stored == [(folder / "data" / f"validation/{number:05d}.png").read_bytes() for number in range(6)]
    code, said = run_aligner("report", grpo)
    page = (grpo / "report.html").read_text()
    assert code == 0 and page.count('<img src="data:image/png;base64,') == 6, said
    (grpo / "images" / rows[0]["images"][0]).rename(folder / "away")
    assert run_aligner("report", grpo)[0] == 0 and (grpo / "report.html").read_text().count("its file is missing") == 1


def test_transformers_loads_its_export_and_gives_the_same_answers(grpo: Path, folder: Path) -> None:
    export = grpo / "export"
    model = transformers.AutoModelForImageTextToText.from_pretrained(export, dtype=torch.float32)
    before = dict(transformers.AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32).named_parameters())
    same = [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]
    assert all("vision_tower" in name for name in same) and not any(
        "patch_embedding" in name for name in same
    )  # its last layer is not read
    processor = transformers.AutoProcessor.from_pretrained(export)
    answers, slot = [], processor.image_token_id  # of a model that has learnt nothing: it is never sampled here
    for row in read_rows(folder / "data" / "validation.jsonl"):
        with Image.open(folder / "data" / row["images"][0]) as image:
            asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row["messages"][0]["content"]}]}]
            text = processor.apply_chat_template(asked, add_generation_prompt=True)
            given = processor(images=image.convert("RGB"), text=text, return_tensors="pt")
        found = model.generate(**given, do_sample=False, max_new_tokens=8, suppress_tokens=[slot])[0, given["input_ids"].shape[1] :]
        answers.append(processor.decode(found, skip_special_tokens=True))
    assert answers == [row["response"].replace("<unk>", "") for row in read_rows(grpo / "validation" / "step_000002.jsonl")]


def test_ppo_with_servers_that_see(grpo: Path, folder: Path) -> None:
    data, model = folder / "data", folder / "sft" / "export"
    asked = read_rows(data / "prompts.jsonl")
    named = ({"prompt": row["messages"], "images": row["images"], "chosen": row["answer"], "rejected": "0+0=0"} for row in asked)
    pairs = write_rows(data / "pairs.jsonl", named)
    sizes = ["data.max_length=48", "algorithm.batch_size=8", "model.freeze=[]", "model.images=true"]
    run_job(train("reward_model"), folder / "reward", [f"model.path={model}", f"data.train={pairs}", *sizes, *FEW])
    own = [f"{part}.path={folder / 'reward' / 'export'}" for part in ("reward.model", "critic.model")]
    own += [f"{part}.images=true" for part in ("model", "reward.model", "critic.model")]
    own += [f"model.path={model}", f"data.train={data / 'prompts.jsonl'}", "data.max_prompt_length=32", "critic.mini_batch_size=8"]
    own += ["rollout.sampling.max_response_length=8", "algorithm.rollouts_per_step=8", "algorithm.mini_batch_size=8"]
    run_job(launcher("ppo"), folder / "ppo", [*own, *FEW])
    assert max(series(folder / "ppo", "rollout/logprob_gap")) < 1e-5 and len(series(folder / "ppo", "policy/kl")) == 2


@pytest.fixture
def demo(digits: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "digits", digits)
    return load_module(ROOT / "examples" / "vision" / "run.py", "vision_run")


def test_the_demo_ends_with_a_report_and_says_what_it_learnt(demo: Any, grpo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (grpo / "report.html").unlink(missing_ok=True)
    first, last = (series(grpo, demo.ACCURACY)[place] for place in (0, -1))
    assert demo._conclude(RunView(grpo), 1.0) == int(last <= first)
    assert f"after SFT {first:.1%}, after GRPO {last:.1%}" in capsys.readouterr().out and (grpo / "report.html").exists()


def test_the_demo_composes_and_holds_digits_out(demo: Any, digits: Any, folder: Path) -> None:
    files = digits.TaskFiles(**{name: folder / "data" / f"{name}.jsonl" for name in ("sft", "prompts", "validation")})
    sft, grpo = compose(TrainSFT, "sft", demo._sft(folder, files)), compose(TrainGRPO, "grpo", demo._grpo(folder, files))
    assert grpo.model.path == str(Path(sft.run.directory) / "export") and grpo.loop.max_steps % grpo.loop.validate_every == 0
    assert grpo.data.num_validation_prompts == digits.Task().num_validation
    halves = {name: digits_in(folder / "data" / name) for name in ("sft", "prompts", "validation")}
    assert halves["validation"].isdisjoint(halves["sft"] | halves["prompts"])


def digits_in(folder: Path) -> set[bytes]:
    """The digits on the pictures of a folder, without their places."""
    found: list[bytes] = []
    for file in folder.iterdir():
        pixels = np.asarray(Image.open(file))
        found += [half[half.any(axis=1)].tobytes() for half in (pixels[:, :8], pixels[:, 8:])]
    return set(found)


def test_digits_that_cannot_be_had_are_a_clear_error(digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other.whl").write_text("no zip")
    with pytest.raises(digits.NoDigits, match="other.whl: no wheel of scikit-learn"):
        digits.load(tmp_path, tmp_path / "other.whl")
    monkeypatch.setattr(digits.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(digits.NoDigits, match="pip could not download it .*--wheel FILE"):
        digits.load(tmp_path / "none")
