"""The stages of `gpu_check.py` by halves: order, limits, figures with predictions and goals, and what to do about each failure.

The predictions were written before any GPU had run this. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HALF_SECONDS = 570.0  # of a call of ten minutes
SETUP_SECONDS = 60.0  # of these for installing wheels and looking what imports


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A figure of a stage: what is predicted of one H100 and one H200, and what is aimed at.

    A `must` is about what is right: the check fails if its goal is missed. Other goals are aims of speed and memory. `full`: a must of
    models and steps of full size only.
    """

    name: str
    h100: float
    h200: float
    goal: str = ""  # as "<= 0.1" or ">= 0.6"
    must: bool = False
    full: bool = False
    because: str = ""
    otherwise: str = ""  # what to do if the goal is missed

    def meets(self, value: float) -> bool:
        """Whether the goal is met; without one it is."""
        if not self.goal:
            return True
        relation, bound = self.goal.split()
        return value <= float(bound) if relation == "<=" else value >= float(bound)


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """What a stage may need: a program that ends without an error where it can be used, and prints its version."""

    probe: str
    otherwise: str  # what to do where it does not import


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A function of the modules in gpu_stages/, in which half it runs, the most that it may take, and its figures.

    `gib`: what torch's allocator is predicted to hold at most, in the process of the stage that holds the most.
    """

    name: str
    half: int
    seconds: float
    gib: float
    figures: tuple[Figure, ...]
    failed: str  # what to do if it ends with an error
    late: str = "run it alone with --only and a larger --slowness; if it hangs, `py-spy dump` of its process says where"
    needs: str = ""  # a package without which there is nothing to run
    uses: str = ""  # one without which it runs, and shows less


PACKAGES = {
    "transformer_engine": Package(
        probe="import transformer_engine.pytorch; from importlib.metadata import version; print(version('transformer_engine'))",
        otherwise="use the image of Dockerfile, or go on with model.layers=torch",
    ),
    "flash_attn": Package(
        probe="import flash_attn; from flash_attn import flash_attn_with_kvcache; print(flash_attn.__version__)",
        otherwise="the engine takes torch's varlen_attn, and without that gathers the pages: slower, the same numbers",
    ),
    "varlen_attn": Package(
        probe="import inspect, torch; from torch.nn.attention.varlen import varlen_attn\n"
        "missing = {'window_size', 'enable_gqa', 'seqused_k', 'block_table'} - set(inspect.signature(varlen_attn).parameters)\n"
        "assert not missing, f'torch {torch.__version__}: varlen_attn has no {sorted(missing)}'\nprint(torch.__version__)",
        otherwise="needs torch 2.13; with an older one the engine takes flash_attn, and without that gathers the pages",
    ),
    "vllm": Package(probe="import vllm; print(vllm.__version__)", otherwise="go on with rollout.engine=megatron (docs/rollouts.md)"),
    "tensorrt_llm": Package(
        probe="import tensorrt_llm; print(tensorrt_llm.__version__)", otherwise="use the image of Dockerfile, or rollout.engine=megatron"
    ),
    "trl": Package(
        probe="from trl import GRPOTrainer; import trl; print(trl.__version__)", otherwise="bring it with make gpu-check-wheels"
    ),
    "pytriton": Package(
        probe="import pytriton, tritonclient; print(pytriton.__version__)",
        otherwise="bring it with make gpu-check-wheels; without it servers have the transport http",
    ),
}
TORCH_LAYERS = "go on with model.layers=torch; the least cosine names the module to look at"
PLAN = "fit the plan to this machine: aligner plan --calibrate (docs/planning.md)"


def _must(name: str, predicted: float, goal: str, otherwise: str, because: str = "") -> Figure:
    return Figure(name=name, h100=predicted, h200=predicted, goal=goal, must=True, because=because, otherwise=otherwise)


def _says(name: str, h100: float, h200: float, because: str = "", goal: str = "", otherwise: str = "") -> Figure:
    return Figure(name=name, h100=h100, h200=h200, goal=goal, because=because, otherwise=otherwise)


def _decode(
    size: str, batch: int, milliseconds: tuple[float, float], shares: tuple[float, float], because: str, goal: str = ""
) -> list[Figure]:
    name = f"decode {size}, batch {batch}"
    rates = [round(batch / each * 1e3, -1) for each in milliseconds]
    return [
        _says(f"{name}: step, ms", *milliseconds, because),
        _says(f"{name}: tokens/s", *rates),
        _says(f"{name}: of the bandwidth limit", *shares, goal=goal, otherwise="without a paged kernel this cannot be met: see kernels"),
    ]


def _against_plan(name: str, phases: Mapping[str, tuple[float, float, float, float]], mfu: tuple[float, float]) -> list[Figure]:
    """`phases`: (seconds, of the planned time) of an H100 and of an H200."""
    found = []
    for phase, (h100, of_h100, h200, of_h200) in phases.items():
        found.append(_says(f"{name}: {phase}, s", h100, h200))
        found.append(_says(f"{name}: {phase}, of the planned time", of_h100, of_h200, goal="<= 1.2", otherwise=PLAN))
    found.append(_says(f"{name}: MFU of training", *mfu, goal=">= 0.45", otherwise="Transformer Engine's layers: model.layers=auto"))
    memory = "take the difference off what is left of the device in plans, and say what is not counted"
    found.append(_says(f"{name}: peak memory, of the plan's", 0.95, 0.95, goal="<= 1.1", otherwise=memory))
    return found


def _relative(what: str, predicted: float, otherwise: str) -> Figure:
    return _must(f"{what}, relative error", predicted, "<= 0.01", otherwise)


GATHERED = "weights, and without a paged kernel the cache four times; at least 2 us a kernel"
RUNS = "take the sequences one at a time: model.packing=false; report the sizes"
PRECISION = (
    "model.float32_matmul=highest (the default), TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=0; "
    "if these figures are those with TF32, something sets the precision later"
)
GAP = "rollout.kernels=torch, then rollout.cuda_graphs=false: the setting that closes it names the kernel (docs/agreement.md)"
VLLM_GAP = "rollout.engine=megatron until `aligner gap` names the module (docs/agreement.md)"

FIRST: Sequence[Stage] = (
    Stage(
        name="environment",
        half=1,
        seconds=30,
        gib=2.4,
        failed="no GPU for torch: compare its CUDA with the driver's",
        figures=(
            _says("copy GB/s", 3000, 4300, "90 % of the data sheet, bytes read and written"),
            _says("bf16 matmul TFLOP/s", 700, 750, "three quarters of the peak: the clock falls under load"),
            _says("pinned upload GB/s", 52, 52, "PCIe 5.0 x16"),
            _says("launch of a kernel, us", 5, 5, "from Python, one after the other"),
        ),
    ),
    Stage(
        name="numbers",
        half=1,
        seconds=50,
        gib=0.5,
        failed="run the tests there: make test ARGS='-k numbers'",
        figures=(
            _must("float32 product in a run, relative error", 3e-7, "<= 1e-5", PRECISION, "3e-4 would be TF32"),
            _must("loss, relative gap", 1e-6, "<= 1e-4", PRECISION, "float32 sums in another order"),
            _must("gradients, largest relative gap of a tensor", 1e-5, "<= 1e-4", PRECISION),
            _must("log-probs, largest gap", 5e-6, "<= 1e-4", PRECISION),
            _must(
                "sampled responses that are equal", 1.0, ">= 1", "compare the draws: tests/unit/rollout", "draws are integers of the seed"
            ),
            _says("with TF32: gradients, largest relative gap of a tensor", 2e-3, 2e-3, "ten bits of each factor"),
            _says("with TF32: log-probs, largest gap", 2e-3, 2e-3),
        ),
    ),
    Stage(
        name="kernels",
        half=1,
        seconds=35,
        gib=0.5,
        failed="the line above it names the kernel; " + RUNS,
        figures=(
            _relative("attention of runs: output", 0.003, RUNS),
            *(_relative(f"attention of runs: {whose} gradient", 0.004, RUNS) for whose in ("queries'", "keys'", "values'")),
            _relative("grouped experts", 0.005, "let `multiplies_groups` be false: experts one by one"),
            _relative("gathered pages", 0.003, "rollout.cuda_graphs=false first; report the sizes"),
        ),
    ),
    Stage(
        name="flash_attn",
        half=1,
        seconds=15,
        gib=0.5,
        needs="flash_attn",
        failed="uninstall it, or rollout.kernels=torch: the engine then gathers the pages",
        figures=(_relative("flash_attn over pages", 0.003, "rollout.kernels=torch"),),
    ),
    Stage(
        name="varlen_attn",
        half=1,
        seconds=15,
        gib=0.5,
        needs="varlen_attn",
        failed="rollout.kernels=torch: the engine then gathers the pages",
        figures=(_relative("varlen_attn over pages", 0.003, "rollout.kernels=torch"),),
    ),
    Stage(
        name="sft_bits",
        half=1,
        seconds=80,
        gib=13,
        failed="model.packing=false, then optimizer.distributed=false: which one passes names the part",
        figures=(
            _must("bfloat16 against float32: sft/loss, relative gap", 1e-3, "<= 0.01", RUNS, "log-probs near ln(151936)"),
            _must("bfloat16 against float32: optim/grad_norm, relative gap", 0.01, "<= 0.05", RUNS),
            _must("resumed: steps with equal bits", 1.0, ">= 1", "checkpoint.asynchronous=false; compare checkpoint and memory"),
            _must("recompute=none and full: equal bits", 1.0, ">= 1", "model.recompute=none", "deterministic kernels"),
        ),
    ),
    Stage(
        name="gap",
        half=1,
        seconds=80,
        gib=13,
        failed="rollout.cuda_graphs=false, then rollout.kernels=torch: which one passes names the part",
        figures=(
            _must("responses with and without graphs that are equal", 1.0, ">= 1", "rollout.cuda_graphs=false", "the same kernels"),
            *(
                _must(f"gap with {prompts} prompts, mean", 0.004, "<= 0.02", GAP, "half a step of a logit")
                for prompts in ("shared", "separate")
            ),
            *(_must(f"gap with {prompts} prompts, largest", 0.06, "<= 0.5", GAP) for prompts in ("shared", "separate")),
            _must("offload: numbers of a step that are equal", 1.0, ">= 1", "optimizer.offload=false rollout.offload=false"),
            _says(
                "offload: device memory asleep, of awake", 0.12, 0.12, "the weights of 18 bytes a parameter", "<= 0.25", "report what stays"
            ),
            _says("offload: page-locked host memory, GiB", 5.5, 5.5, "12 bytes for each of 494 million parameters"),
        ),
    ),
    Stage(
        name="two_ranks",
        half=1,
        seconds=70,
        gib=0.1,
        failed="one rank to a GPU: run.ranks_per_gpu=1; on several GPUs aligner preflight tries NCCL",
        figures=(
            *(
                _must(f"{layout} on one GPU, largest relative gap of a loss", 1e-6, "<= 1e-4", f"do without {layout} until it is found")
                for layout in ("tp 2", "pp 2", "cp 2")
            ),
            _must(
                "refit from pp 2 to tp 2, verified: responses as from replicas", 1.0, ">= 1", "rollout.tp=0, which takes training's layout"
            ),
        ),
    ),
    Stage(
        name="ppo",
        half=1,
        seconds=65,
        gib=0.3,
        uses="pytriton",
        failed="the logs of the servers say why: critic.server.transport=http first, then each component on a GPU of its own",
        figures=(
            _says(
                "PPO: device memory of all processes at most, GiB",
                2.5,
                2.5,
                "three contexts of half a GiB and small models",
                "<= 4",
                "Triton's own contexts: see the processes above",
            ),
            _must("PPO: device memory left behind, GiB", 0.0, "<= 0.2", "a process outlives the run: nvidia-smi names it"),
            _says("PPO: step, s", 0.6, 0.6, "eight turns on the GPU, each a lock and a copy of small weights"),
            Figure(
                name="PPO: reward of the last steps",
                h100=0.5,
                h200=0.5,
                goal=">= 0.2",
                must=True,
                full=True,
                because="as on a CPU",
                otherwise="the same on a CPU: make learn; if it learns there, placement=separate",
            ),
        ),
    ),
    Stage(
        name="speed",
        half=1,
        seconds=60,
        gib=42,
        failed="a smaller model.micro_batch_tokens, if memory has run out",
        figures=(
            *_decode("1.5b", 1, (1.5, 1.3), (0.68, 0.55), "450 kernels of a step against 1.0 or 0.7 ms of reading weights"),
            *_decode("1.5b", 32, (2.4, 1.9), (0.5, 0.45), GATHERED, ">= 0.6"),
            _says(
                "refit by whole tensors, of a copy's speed",
                0.5,
                0.5,
                "two copies instead of one",
                ">= 0.5",
                "a larger rollout.refit_bucket_mib",
            ),
            _says("SFT 1.5b, torch's layers: tokens/s", 31000, 32800, "unfused norms, RoPE and SwiGLU: a third of the time moves memory"),
            *_against_plan("SFT 1.5b, torch's layers", {"train": (1.05, 1.08, 1.0, 1.2)}, (0.31, 0.33)),
        ),
    ),
)

SECOND: Sequence[Stage] = (
    Stage(
        name="transformer_engine",
        half=2,
        seconds=80,
        gib=42,
        needs="transformer_engine",
        failed="go on with model.layers=torch; NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 says which attention it chose",
        figures=(
            _must("transformer_engine against torch: log-probs, mean gap", 0.004, "<= 0.02", TORCH_LAYERS, "both round to bfloat16"),
            _says("transformer_engine against torch: log-probs, largest gap", 0.05, 0.05),
            _must("transformer_engine against torch: least cosine of a gradient", 0.9997, ">= 0.999", TORCH_LAYERS),
            _must("fp8 against torch: log-probs, mean gap", 0.03, "<= 0.1", "model.fp8=false", "three bits of mantissa, scaled"),
            _says("fp8 against torch: log-probs, largest gap", 0.3, 0.3),
            _says("fp8 against torch: least cosine of a gradient", 0.98, 0.98, "", ">= 0.95", "model.fp8=false"),
            _says("SFT 1.5b, Transformer Engine's layers: tokens/s", 42000, 43700),
            *_against_plan("SFT 1.5b, Transformer Engine's layers", {"train": (0.78, 0.8, 0.75, 0.9)}, (0.42, 0.43)),
        ),
    ),
    Stage(
        name="vllm",
        half=2,
        seconds=110,
        gib=3,
        needs="vllm",
        failed="rollout.vllm.enforce_eager=true, then rollout.offload=false: which one passes names the part",
        figures=(
            *(
                figure
                for weights in ("first weights", "negated", "first weights again")
                for figure in (
                    _must(f"vLLM, {weights}: gap to the trainer, mean", 0.006, "<= 0.02", VLLM_GAP, "stale weights would give 0.5"),
                    _must(f"vLLM, {weights}: gap to the trainer, largest", 0.1, "<= 0.5", VLLM_GAP),
                )
            ),
            _says(
                "vLLM: responses of the first weights that come again",
                1.0,
                1.0,
                "seeds of requests",
                ">= 0.9",
                "rollout.vllm.prefix_caching=false",
            ),
            _says(
                "vLLM: device memory that sleep gives back, GiB",
                0.5,
                0.5,
                "its weights and cache go, the policy's weights come",
                ">= 0",
                "rollout.offload=false",
            ),
        ),
    ),
    Stage(
        name="tensorrt_llm",
        half=2,
        seconds=115,
        gib=2,
        needs="tensorrt_llm",
        failed="docs/tensorrt_llm.md has the steps; until then rollout.engine=megatron",
        figures=(_must("TensorRT-LLM: refits, decodes and sleeps", 1.0, ">= 1", "rollout.engine=megatron"),),
    ),
    Stage(
        name="decode",
        half=2,
        seconds=50,
        gib=19,
        failed="a smaller rollout.max_batch_size, if memory has run out",
        figures=(
            *_decode("0.5b", 32, (1.2, 1.1), (0.34, 0.26), f"380 kernels of a step; {GATHERED}"),
            *_decode("1.5b", 128, (6.0, 4.5), (0.36, 0.34), GATHERED),
            *_decode("7b", 32, (7.6, 5.6), (0.72, 0.68), GATHERED, ">= 0.6"),
        ),
    ),
    Stage(
        name="grpo_speed",
        half=2,
        seconds=60,
        gib=52,
        failed="a smaller model.micro_batch_tokens, or optimizer.offload=true, if memory has run out",
        figures=(
            *_against_plan(
                "GRPO 1.5b",
                {"generate": (1.7, 0.87, 1.5, 0.9), "ref_logprobs": (0.38, 0.93, 0.35, 1.0), "train": (1.4, 1.1, 1.3, 1.18)},
                (0.33, 0.36),
            ),
            _says(
                "GRPO 1.5b with offload: train, of without",
                1.4,
                1.4,
                "18.5 GB of the optimizer's state come back, at 50 GB/s",
                "<= 1.6",
                "optimizer.offload=false",
            ),
            _says("GRPO 1.5b with offload: generate, of without", 1.3, 1.3, "and go, before it", "<= 1.6", "rollout.offload=false"),
        ),
    ),
    Stage(
        name="trl",
        half=2,
        seconds=75,
        gib=30,
        needs="trl",
        failed="its log says whether the two did the same work",
        figures=(
            _says("TRL / ours: total", 4.0, 4.0, "its generation launches each kernel of each step", ">= 1", "profile the slower phase"),
            _says("TRL / ours: generation", 6.0, 6.0),
            _says("TRL / ours: train", 1.5, 1.5),
        ),
    ),
)
STAGES = (*FIRST, *SECOND)
STAGES_BY_NAME = {stage.name: stage for stage in STAGES}
