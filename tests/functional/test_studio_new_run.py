"""A run that is configured, planned and started in a real browser, and then talked with; its better answers become data."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import browser
import pytest
from browser import Page, studio
from slurm_cluster import SlurmCluster
from slurm_runs import ENVIRONMENT
from training_jobs import eventually, read_rows, run_aligner, write_rows

if why := browser.missing():
    pytest.skip(why, allow_module_level=True)

import torch
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from aligner.studio.runs import LAUNCH_LOG
from aligner.studio.served import PREFERENCES

pytestmark = [pytest.mark.browser, pytest.mark.cpu, pytest.mark.timeout(600)]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HOSTILE = "<img src=x onerror=\"document.title='taken over'\">"


def write_model(folder: Path, template: str = "") -> None:
    """A tiny Llama whose tokens are bytes."""
    from aligner.commands.validate_data import _stand_in

    folder.mkdir()
    tokenizer = AutoTokenizer.from_pretrained(_stand_in(folder))
    tokenizer.chat_template = template or None
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    LlamaForCausalLM(LlamaConfig(vocab_size=260, max_position_embeddings=512, **sizes, **ends)).save_pretrained(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("studio")
    write_model(root / "chats", CHATML)
    write_model(root / "continues")
    rows = ((f"What is {a} plus {b}? {HOSTILE}", f"It is {a + b}.") for a in range(4) for b in range(4))
    turns = ([{"role": "user", "content": asked}, {"role": "assistant", "content": said}] for asked, said in rows)
    write_rows(root / "train.jsonl", ({"messages": messages} for messages in turns))
    (root / "runs").mkdir()
    return root


@contextmanager
def studio_over(folder: Path, *options: str, **variables: str) -> Iterator[Page]:
    """A page of a studio that is killed in the end: what it served ends too."""
    try:
        with studio(folder, *options, end=signal.SIGKILL, **variables) as url, browser.chromium(width=1500, height=1400) as driver:
            yield Page(driver, url)
    finally:
        assert eventually(lambda: not served_below(folder.parent), 30), served_below(folder.parent)


def enter(page: Page, values: dict[str, object]) -> None:
    """Write these into the fields with these labels."""
    for label, value in values.items():
        page.field(label).send_keys(Keys.CONTROL, "a")
        page.field(label).send_keys(str(value))


def served_below(folder: Path) -> list[str]:
    """The command lines of processes that serve a model of this folder."""
    lines = [path.read_bytes().replace(b"\0", b" ").decode() for path in Path("/proc").glob("[0-9]*/cmdline") if path.parent.is_dir()]
    return [line for line in lines if " serve " in line and str(folder) in line]


def fill(page: Page, place: Path, name: str) -> None:
    page.open("/new?config=sft")
    page.wait_for("Cannot start: data.train is required", seconds=300)  # a process has imported torch
    values = {"data.train": place / "train.jsonl", "model.path": place / "chats", "loop.max_steps": 2, "algorithm.batch_size": 4}
    enter(page, {**values, "optimizer.lr": "1e-2", "Name of the run": name})
    page.wait_for("All 2 steps take", seconds=120)


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    """A run that was planned, refused, mended and started in the page; the studio is killed while it runs."""
    with studio_over(place / "runs") as page:
        fill(page, place, "first")
        assert page.driver.find_element(By.CSS_SELECTOR, '[role=img][aria-label^="chart: memory of trainer"]').rect["height"] > 50
        assert page.driver.find_elements(By.CSS_SELECTOR, "[role=img] canvas, [role=img] svg")
        page.click("Look at the data")
        page.wait_for("16 of 16 records can be used, 0 bad", seconds=300)
        assert HOSTILE in page.text  # as text
        assert "taken over" not in page.driver.title
        trained = page.driver.find_elements(By.CSS_SELECTOR, "div[style*=underline]")
        assert "It is 0.<|im_end|>" in trained[0].text

        enter(page, {"optimizer.lr": "-3"})
        page.wait_for("Cannot start: optimizer.lr=-3.0")
        beside = page.driver.find_element(By.CSS_SELECTOR, ".q-field--error")
        page.until(lambda: "optimizer.lr=-3.0, min_lr" in beside.text)
        page.click("Start")
        page.wait_for("not started")
        enter(page, {"optimizer.lr": "1e-2", "Name of the run": "../outside"})
        page.wait_for("name='../outside'")
        enter(page, {"Name of the run": "first"})
        page.wait_for("All 2 steps take", seconds=120)
        assert f"run.directory={place / 'runs' / 'first'}" in page.text  # of the command
        page.click("Start")
        page.until(lambda: page.driver.current_url.endswith("/run/first"), 120)
    directory = place / "runs" / "first"
    assert eventually(lambda: (directory / "done.json").is_file(), 120), (directory / LAUNCH_LOG).read_text()
    return directory


def test_the_run_outlives_the_studio_and_is_the_one_of_the_form(run: Path, place: Path) -> None:
    assert json.loads((run / "done.json").read_text())["step"] == 2
    config = (run / "config.yaml").read_text()
    assert f"train: {place / 'train.jsonl'}" in config
    assert "lr: 0.01" in config
    assert sorted(path.name for path in (place / "runs").iterdir() if not path.name.startswith(".")) in (["first"], ["first", PREFERENCES])


def test_the_better_of_two_answers_becomes_a_pair(run: Path, place: Path) -> None:
    temporary = place / "temporary"
    temporary.mkdir()
    with studio_over(place / "runs", TMPDIR=str(temporary)) as page:
        page.open("/chat")
        page.wait_for("Ctrl+Enter sends")
        offered = [one.get_attribute("value") for one in page.driver.find_elements(By.CSS_SELECTOR, "datalist option")]
        assert str(run / "export") in offered
        enter(page, {"Policy A": run / "export", "Policy B": place / "chats", "Most tokens": 12, "System prompt": "Be kind."})
        enter(page, {"Message": "What is 2 plus 3?"})
        page.click("Send")
        page.until(lambda: page.named("B is better"), 120)
        assert served_below(place)
        page.click("B is better")
        page.wait_for("appended to")

        enter(page, {"Policy B": Keys.BACKSPACE, "Policy A": place / "continues"})
        page.field("Message").send_keys("Once ", Keys.CONTROL, Keys.ENTER)
        page.wait_for("has no chat template: it continues the text", seconds=120)
        enter(page, {"Policy A": place / "missing"})
        page.until(lambda: page.named("Send")[0].is_enabled())
        page.field("Message").send_keys("Who?", Keys.CONTROL, Keys.ENTER)
        page.wait_for(f"error: model.path={place / 'missing'}: no such directory", seconds=120)
    assert not list(temporary.iterdir())  # the studio was killed, and had keys of two policies
    pairs = place / "runs" / PREFERENCES
    (pair,) = read_rows(pairs)
    assert pair["prompt"] == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What is 2 plus 3?"}]
    assert pair["chosen"][0]["role"] == pair["rejected"][0]["role"] == "assistant"
    assert pair["chosen"] != pair["rejected"]
    code, said = run_aligner("data", "validate", pairs, "--kind", "preference", "--tokenizer", place / "chats")
    assert (code, "1 of 1 records can be used, 0 bad" in said) == (0, True), said


def test_a_read_only_studio_starts_and_writes_nothing(run: Path, place: Path) -> None:
    before = sorted(place.rglob("*"))
    with studio_over(place / "runs", "--read-only") as page:
        fill(page, place, "second")
        assert not page.named("Start")
        assert "read-only: it starts nothing" in page.text
        enter(page, {"Name of the run": "first"})
        page.wait_for("exists: it will be resumed")
        page.open("/chat")
        page.wait_for("Ctrl+Enter sends")
        enter(page, {"Policy A": run / "export", "Policy B": run / "export", "Most tokens": 12})
        page.field("Message").send_keys("Hello", Keys.CONTROL, Keys.ENTER)
        page.until(lambda: page.named("A is better"), 120)
        page.click("A is better")
        page.wait_for("--read-only: this studio writes nothing")
    assert sorted(place.rglob("*")) == before


@pytest.mark.slurm
@pytest.mark.timeout(900)
def test_a_run_by_slurm_is_shown_submitted_and_queued_before_it_runs(place: Path, slurm: SlurmCluster, tmp_path: Path) -> None:
    slurm.write_programs(tmp_path, "sbatch", "scontrol")
    slurm.run("scontrol", "update", "partitionname=batch", "state=down")
    with studio_over(place / "runs", **ENVIRONMENT, PATH=f"{tmp_path}:{os.environ['PATH']}") as page:
        fill(page, place, "by_slurm")
        page.choose("cluster preset", "laptop")
        page.choose("Where", "Slurm")
        script = page.driver.find_element(By.CSS_SELECTOR, '[aria-label="batch script"]')
        page.until(lambda: "#SBATCH --nodes=1" in script.text and f"run.directory={place / 'runs' / 'by_slurm'}" in script.text, 120)
        assert not (place / "runs" / "by_slurm").exists()
        page.click("Start")
        page.until(lambda: page.driver.current_url.endswith("/run/by_slurm"), 120)
        page.wait_for("queued")
        job = slurm.job(int(re.findall(r"Slurm job (\d+)", page.text)[0]), place / "runs" / "by_slurm")
        page.open("/")
        page.wait_for(f"Slurm job {job.number}")
        slurm.run("scontrol", "update", "partitionname=batch", "state=up")
        job.wait("COMPLETED", timeout_seconds=400)
        page.wait_for("2 of 2")
        page.until(lambda: any({"by_slurm", "done"} <= set(row.text.split()) for row in page.driver.find_elements(By.TAG_NAME, "tr")))
