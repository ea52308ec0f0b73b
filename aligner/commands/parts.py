"""Parts of the commands of `aligner`: class, shared arguments, options from the fields of a dataclass. Imports click only: fast help."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import Any

import click

from aligner.settings.command_line import override


class Command(click.Command):
    """A command that `main` runs after click has returned: click would turn Ctrl-C and broken pipes into errors of its own."""

    def invoke(self, ctx: click.Context) -> Callable[[], int]:
        if (folder := ctx.params.pop("config_dir", None)) is not None:  # as an override it reaches every process of the run
            ctx.params["overrides"] = (*ctx.params["overrides"], override("hydra.searchpath", [f"file://{folder.resolve()}"]))
        return partial(self.callback, **ctx.params)

    def get_short_help_str(self, limit: int = 45) -> str:
        return super().get_short_help_str(limit=200)  # whole sentences in the list of commands


class Argument(click.Argument):
    """An argument; `about` is printed below the options."""

    def __init__(self, name: str, metavar: str, about: str = "", **settings: Any) -> None:
        super().__init__([name], metavar=metavar, **settings)
        self.about = about


def add(
    group: click.Group,
    place: str,
    *parameters: click.Parameter,
    help: str,
    options: type[Any] | None = None,
    kind: type[Command] = Command,
) -> None:
    """Add the command `name = module:function`, imported when it runs; `module` is one of `aligner.commands`, or a full name. The function
    gets the parameters by name; the fields of the dataclass `options` are further options, and reach it as `options`."""
    name, module, function = re.split(" = |:", place)
    module = module if module.startswith("aligner.") else f"aligner.commands.{module}"
    declared = () if options is None else fields(options)

    def call(**given: Any) -> int:
        if options is not None:
            given["options"] = options(**{one.name: given.pop(one.name) for one in declared})
        return getattr(import_module(module), function)(**given)  # type: ignore[no-any-return]

    of_fields = [click.Option([one.metadata["name"], one.name], default=one.default, **one.metadata["settings"]) for one in declared]
    epilog = " ".join(one.about for one in parameters if isinstance(one, Argument) and one.about)
    group.add_command(kind(name, callback=call, params=[*parameters, *of_fields], help=help, epilog=epilog))


def config_names(context: click.Context | None, parameter: click.Parameter | None, incomplete: str) -> list[str]:
    """Config names with this prefix, for completion in a shell."""
    from aligner.files import configs

    return [name for name in configs() if name.startswith(incomplete)]


def configs_or(kind: str, context: click.Context | None, parameter: click.Parameter | None, incomplete: str) -> list[Any]:
    """`config_names`, and paths, which the shell completes itself (`kind`: file, dir)."""
    from click.shell_completion import CompletionItem

    found = [CompletionItem(name) for name in config_names(context, parameter, incomplete)]
    return [CompletionItem(incomplete, type=kind), *found]


class Amount(click.FloatRange):
    """A finite number that is not negative; click itself lets NaN through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not isfinite(number):
            self.fail(f"{value} is not finite.", param, ctx)
        return number


DTYPES = ("auto", "float32", "bfloat16", "float16")
AMOUNT, COUNT, NOT_NEGATIVE = Amount(min=0), click.IntRange(min=1), click.IntRange(min=0)
FILE = click.Path(path_type=Path, readable=False)
DIRECTORY = click.Path(path_type=Path, readable=False, file_okay=False)
CONFIG_HELP = "CONFIG: a recipe, such as ppo, or one of its configs in conf/ppo/, such as ppo_70b."
CONFIG = Argument("name", "CONFIG", CONFIG_HELP, shell_complete=config_names)
SETTINGS = (
    Argument("overrides", "[KEY=VALUE]...", "KEY=VALUE: settings, as for `aligner train`.", nargs=-1),
    click.Option(["--config-dir"], type=DIRECTORY, metavar="DIR", help="Directory of your own configs and presets."),
)
RUN = Argument("directory", "RUN_DIRECTORY", "RUN_DIRECTORY: run.directory of the run, which may still be running.", type=DIRECTORY)


def option(default: Any, name: str, metavar: str = "", help: str = "", **settings: Any) -> Any:
    """A field of a dataclass that is an option of a command; `settings` are click's."""
    shown = isinstance(default, int) and default > 1
    settings |= {"metavar": metavar or None, "help": help, "is_flag": default is False, "show_default": shown}
    return field(default=default, metadata={"name": name, "settings": settings})


json_field = partial(option, None, "--json", "FILE", "Write all results to FILE as JSON.", type=FILE)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    plain: bool = option(False, "--plain", help="Continue texts, without the model's chat template.")
    answer_field: str = option("", "--answer-field", "NAME", "Field of the records with the reference answer (default: as in training).")
    limit: int = option(0, "--limit", "N", "Read the first N records alone.", type=NOT_NEGATIVE)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions(ReadOptions):
    temperature: float = option(1.0, "--temperature", "T", "Divides the logits; 0: greedy (default: 1).", type=AMOUNT)
    top_p: float = option(1.0, "--top-p", "P", "Sample from the likeliest tokens with this share of the probability.", type=AMOUNT)
    top_k: int = option(0, "--top-k", "K", "Sample from the K likeliest tokens.", type=NOT_NEGATIVE)
    max_tokens: int = option(256, "--max-tokens", "N", "The most tokens of a response.", type=COUNT)
    stop: tuple[str, ...] = option((), "--stop", "TEXT", "End a response behind this text; may be given several times.", multiple=True)
    samples: int = option(1, "--samples", "N", "Responses to each prompt (default: 1).", type=COUNT)
    seed: int = option(0, "--seed", "N", "Another seed, other responses.", type=NOT_NEGATIVE)
    batch_size: int = option(32, "--batch-size", "N", "Responses that are sampled at once.", type=COUNT)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions(SamplingOptions):
    system: str = option("", "--system", "TEXT", "The system message.")
    against: str = option("", "--against", "MODEL", "Show another model's answers beside.")


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions(SamplingOptions):
    input: Path | None = option(None, "--input", "FILE", "Records with prompts, in any form that training reads.", type=FILE)
    output: Path | None = option(None, "--output", "FILE", "Write the records with a response each to FILE, as jsonl.", type=FILE)
    field_name: str = option("response", "--field", "NAME", "Field for the response (default: response).")
    logprobs: bool = option(False, "--logprobs", help="Also write the tokens and their log-probs.")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions(SamplingOptions):
    data: Path | None = option(None, "--data", "FILE", "Records with prompts, and answers for the reward function.", type=FILE)
    reward: str = option("", "--reward", "FUNCTION", "package.module:name or file.py:name: what is right scores at least --threshold.")
    threshold: float = option(1.0, "--threshold", "X", "The least reward of a response that is right (default: 1).", type=float)
    k: tuple[int, ...] = option((), "--k", "K", "For pass@k (default: 1, 2, 4, ... up to --samples).", multiple=True, type=COUNT)
    judge: Path | None = option(None, "--judge", "FILE", "YAML with the settings of a judge, as of reward.functions.NAME.", type=FILE)
    against: str = option("", "--against", "MODEL", "With --judge: how often the first model's responses win.")
    pairs: Path | None = option(None, "--pairs", "FILE", "Preference pairs: how often a reward model prefers the chosen one.", type=FILE)
    tasks: str = option("", "--tasks", "A,B", "Tasks of lm-eval, through its own client.")
    lm_eval: str = option("lm_eval", "--lm-eval", "PATH", "The program lm_eval, of an environment of its own (default: on PATH).")
    output: Path | None = option(None, "--output", "FILE", "The results, as JSON; and beside them FILE.md.", type=FILE)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    search: bool = option(False, "--search", help="Find the fastest layouts, placement and GPU shares; given settings are kept.")
    gpus: int = option(0, "--gpus", "N", "Search on at most N GPUs (default: the config's).")
    steps: int = option(0, "--steps", "N", "With --search: training steps used to estimate hours.", type=NOT_NEGATIVE)
    deadline: str = option("", "--deadline", "TIME", "Search the fewest GPUs that make the steps in 24h, 2d, 90m.")
    write: Path | None = option(
        None, "--write", "DIR", "With --search: write the best job to DIR, as a config and a Slurm script.", type=DIRECTORY
    )
    top: int = option(5, "--top", "N", "With --search: rows of a table.", type=COUNT)
    against: Path | None = option(
        None, "--against", "RUN", "Compare with what this run measured (without CONFIG: its own config).", type=DIRECTORY
    )
    html: Path | None = option(None, "--html", "FILE", "Write memory by phase and the timeline of a step as one page.", type=FILE)
    trace: Path | None = option(None, "--trace", "FILE", "Write a step as a trace for ui.perfetto.dev or chrome://tracing.", type=FILE)
    explain: bool = option(False, "--explain", help="Also show what takes the time of a step, and which settings would shorten it.")
    calibrate: Path | None = option(
        None, "--calibrate", "FILE", "Instead fit the cluster's parameters to the measured jobs of FILE.", type=FILE
    )
    json_path: Path | None = json_field()


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightOptions:
    only: str = option("", "--only", "A,B", "Run only these checks (ranks, config and hub always run).")
    engine: bool = option(False, "--engine", help="Also build the model and its rollout engine, refit it and generate.")
    timeout: float = option(0.0, "--timeout", "SECONDS", "Timeout per check, overriding each check's default.", type=AMOUNT)
    json_path: Path | None = json_field()


@dataclass(frozen=True, kw_only=True, slots=True)
class GapOptions:
    num_prompts: int = option(16, "--prompts", "N", "Number of prompts from data.train.", type=COUNT)
    random_prompts: bool = option(False, "--random-prompts", help="Use prompts of random tokens instead of data.train.")
    num_tokens: int = option(32, "--tokens", "N", "Maximum tokens per response.", type=COUNT)
    num_traced: int = option(4, "--traced", "N", "Number of responses whose layers are compared, worst first.", type=COUNT)
    greedy: bool = option(False, "--greedy", help="Sample greedily (log-probs at temperature 1).")
    ulps: float = option(0.0, "--ulps", "X", "Tolerance of an operation (default: 128 float32, else 16).", type=AMOUNT)
    gap: float = option(
        0.0, "--gap", "NATS", "Tolerance of the mean gap (default: 1e-4 float32, 0.05 bfloat16, 0.01 float16).", type=AMOUNT
    )
    json_path: Path | None = json_field()


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectOptions:
    kind: str = option("", "--kind", "KIND", "Dataset type of a file: sft, preference, kto, ... (docs/data.md; `inspect` detects it).")
    tokenizer: str = option("", "--tokenizer", "DIR", "Directory of the model's tokenizer, for a file.", type=click.Path())
    num_samples: int = option(3, "--samples", "N", "Number of samples to show.", type=NOT_NEGATIVE)


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidateOptions(InspectOptions):
    lists_all: bool = option(False, "--all", help="List every problem, not the first few of each kind.")
    html_path: Path | None = option(None, "--html", "FILE", "Write the samples to FILE as a page, with their images.", type=FILE)
    json_path: Path | None = json_field()


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions:
    dry_run: bool = option(False, "--dry-run", help="Print the script instead of submitting it.")
    test_only: bool = option(False, "--test-only", help="Ask Slurm whether and when it could run (sbatch --test-only).")
    output: Path | None = option(None, "--output", "FILE", "Write the script to FILE instead of submitting it.", type=FILE)
    separate: bool = option(
        False, "--separate", help="Submit one job per component, for sites without heterogeneous jobs (slurm.separate=true)."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertOptions:
    from_hf: Path | None = option(None, "--from-hf", "DIR", "Hugging Face directory to read, or ORG/NAME[@REV] of the Hub.", type=DIRECTORY)
    from_megatron: Path | None = option(
        None, "--from-megatron", "PATH", "Checkpoint to read, or a folder with some; also Megatron-LM's and NeMo's.", type=FILE
    )
    to_megatron: Path | None = option(None, "--to-megatron", "DIR", "Directory for the checkpoint.", type=DIRECTORY)
    to_hf: Path | None = option(None, "--to-hf", "DIR", "Directory for the Hugging Face model.", type=DIRECTORY)
    push_to: str = option("", "--push-to-hub", "ORG/NAME", "Upload the Hugging Face model, with a card.")
    tokenizer: Path | None = option(None, "--tokenizer", "DIR", "Tokenizer for a model of Megatron-LM or NeMo without one.", type=DIRECTORY)
    tp: int = option(1, "--tp", "N", "Split every layer over N ranks (start as many: torchrun, srun, mpiexec).")
    pp: int = option(1, "--pp", "N", "Split the layers over N ranks.")


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyOptions:
    """How a command opens the policy that it samples from (`aligner.jobs.serving_policy`)."""

    max_batch_size: int = option(32, "--max-batch-size", "N", "Responses that are sampled at once.", type=COUNT)
    context: int = option(0, "--context", "N", "Longest prompt with response, in tokens (default: the model's).", type=NOT_NEGATIVE)
    kv_cache_tokens: int = option(0, "--kv-cache-tokens", "N", "Tokens in the key-value cache (default: enough).", type=NOT_NEGATIVE)
    dtype: str = option("auto", "--dtype", "DTYPE", "auto, float32, bfloat16 or float16.", type=click.Choice(DTYPES))
    images: bool = option(False, "--images", help="Read images too, through the model's own vision tower.")
    seed: int = option(0, "--seed", "N", "From which the seeds of requests without one are drawn.", type=NOT_NEGATIVE)
    greedy: bool = option(False, "--greedy", help="Temperature 0 where a request names none.")

    @property
    def opening(self) -> dict[str, Any]:
        names = ("max_batch_size", "context", "kv_cache_tokens", "dtype", "images", "seed")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions(PolicyOptions):
    host: str = option("127.0.0.1", "--host", "ADDRESS", "Address to listen on; 0.0.0.0: every one of this machine.")
    port: int = option(0, "--port", "N", "Port to listen on (default: a free one).", type=click.IntRange(0, 65535))
    name: str = option("", "--name", "NAME", "Name of the model in answers (default: the directory's).")
    key_file: Path | None = option(
        None,
        "--key-file",
        "FILE",
        "File with the key, 64 hexadecimal digits; made if missing (default: a new one).",
        type=FILE,
    )
    max_requests: int = option(256, "--max-requests", "N", "Requests at once; others are told to come again.", type=COUNT)
    tls_certificate: Path | None = option(None, "--tls-certificate", "FILE", "PEM file with a certificate, to speak HTTPS.", type=FILE)
    tls_key: Path | None = option(None, "--tls-key", "FILE", "PEM file with its key.", type=FILE)


@dataclass(frozen=True, kw_only=True, slots=True)
class MigrateOptions:
    framework: str = option("", "--from", "NAME", "Framework of the input, such as trl, if it is not recognised.")
    trains: str = option("", "--trains", "NAME", "What the input trains, such as dpo, if its keys do not show it.")
    ranks: int = option(0, "--ranks", "N", "Number of training GPUs, if batch sizes are per device.", type=NOT_NEGATIVE)
    examples: int = option(0, "--examples", "N", "Number of training examples, used to convert epochs to steps.", type=NOT_NEGATIVE)
    output: Path | None = option(None, "--output", "FILE", "Write the config (.yaml) or the command (.sh) to FILE.", type=FILE)
    json_path: Path | None = json_field()


@dataclass(frozen=True, kw_only=True, slots=True)
class StudioOptions:
    port: int = option(8080, "--port", "N", "Port; 0 chooses a free one.", type=click.IntRange(0, 65535))
    host: str = option("127.0.0.1", "--host", "HOST", "Address to listen on (default: 127.0.0.1, this machine alone).")
    allow_host: tuple[str, ...] = option((), "--allow-host", "NAME", "Another host name in the browser, of a proxy.", multiple=True)
    root_path: str = option("", "--root-path", "PATH", "Path below which a proxy shows the pages (Open OnDemand, JupyterHub).")
    read_only: bool = option(False, "--read-only", help="Show runs, but start and write nothing.")
