"""What rank 0 concludes from what the ranks saw: by hand-made observations, good ones and bad ones."""

from dataclasses import asdict, replace
from io import StringIO

import pytest
from rich.console import Console

from aligner.commands.parts import PreflightOptions
from aligner.commands.preflight import cluster, ranks, sizing
from aligner.commands.preflight.command import ITEMS, chosen
from aligner.commands.preflight.framework import Finding, Level, show, summary, to_json
from aligner.parallel.links import Link, Span, rounds

GIB = 2**30
HOST = sizing.Machine(gpus=0, gpu="", gpu_bytes=0, gpu_free_bytes=0, host_bytes=64 * GIB, shared_bytes=8 * GIB)
H100 = replace(HOST, gpus=2, gpu="H100", gpu_bytes=80 * GIB, gpu_free_bytes=79 * GIB)


def test_versions_name_the_rank_that_differs(context_of):
    context = context_of(nodes=("n0", "n1"))
    same = {"torch": "2.13.0", "megatron-core": "0.16.1"}
    other = {"torch": "2.12.0", "megatron-core": "0.16.1"}
    assert ranks.judge_versions(context, {0: same, 1: same}).level is Level.ok
    found = ranks.judge_versions(context, {0: same, 1: other})
    assert found.level is Level.fatal and found.found == "rank 1 on n1: torch is 2.12.0 and not 2.13.0"
    assert ranks.judge_versions(context, {0: ({"megatron-core": "absent"})}).level is Level.fatal


@pytest.mark.parametrize(
    ("second", "level", "text"),
    [
        (H100, Level.ok, "H100, 80.0 GiB each"),
        (replace(H100, gpus=0), Level.fatal, "rank 1 on n0: no GPU is visible"),
        (replace(H100, gpu="A100"), Level.fatal, "rank 1 on n0: A100 and not H100"),
        (replace(H100, gpu_free_bytes=40 * GIB), Level.warning, "only 40.0 GiB free"),
        (replace(H100, shared_bytes=GIB // 2), Level.warning, "/dev/shm has 0.50 GiB"),
    ],
)
def test_gpus(context_of, on_gpus, second, level, text):
    context = context_of(on_gpus, nodes=("n0", "n0"))
    found = sizing.judge_devices(context, {0: H100, 1: second})
    assert found.level is level and text in found.found


def test_gpus_that_are_missing_or_too_few(context_of, settings, on_gpus):
    planned_for_gpus = context_of(on_gpus)
    assert sizing.judge_devices(planned_for_gpus, {0: HOST}).level is Level.fatal
    assert sizing.judge_devices(context_of(settings("ppo")), {0: HOST}).level is Level.ok
    crowded = context_of(settings("ppo"), nodes=("n0",) * 3)
    found = sizing.judge_devices(crowded, {rank: H100 for rank in range(3)})
    assert found.level is Level.fatal and "2 GPUs for 3 ranks" in found.found


@pytest.mark.parametrize(("seconds", "level"), [(0.01, Level.ok), (-3.0, Level.warning), (90.0, Level.fatal)])
def test_clocks(context_of, seconds, level):
    found = cluster.judge_clock(context_of(nodes=("n0", "n1")), {0: 0.0, 1: seconds})
    assert found.level is level
    assert level is Level.ok or f"n1 is {abs(seconds):g} s {'ahead of' if seconds > 0 else 'behind'} n0" == found.found


def test_rounds_pair_every_node_with_those_one_bit_away():
    nodes = ["a", "a", "b", "b", "c", "c"]  # ranks 0-1, 2-3, 4-5
    assert rounds(nodes, every_rank=False) == [[((0, 2), 0)], [((0, 4), 0)]]  # node 3 does not exist: c has no partner in the first round
    assert rounds(nodes, every_rank=True)[0] == [((0, 2), 0), ((1, 3), 1)]
    assert rounds(["a"], every_rank=True) == []


def measured(*rates: float, span: Span = Span.between_nodes) -> list[dict]:
    links = [Link(span=span, name=f"n{i} - n{i + 1}", nodes=(), ranks=2, latency_seconds=1e-5, rate=rate) for i, rate in enumerate(rates)]
    return [asdict(link) for link in links]


def test_the_slow_link_is_named(context_of, on_gpus):
    context = context_of(on_gpus, nodes=("n0", "n1"))
    assert cluster.judge_network(context, {0: measured(40e9, 41e9, 42e9)}).level is Level.ok
    found = cluster.judge_network(context, {0: measured(40e9, 41e9), 1: measured(12e9)})
    assert found.level is Level.warning and "n0 - n1: 30% of the median" in found.found  # 12 of the median, 40
    assert found.figures["between_nodes_gb_per_second"] == 12.0
    planned = cluster.judge_network(context, {0: measured(10e9, 10e9)})  # a fifth of the cluster file's 50 GB/s
    assert planned.level is Level.warning and "cluster.network_gb_per_second=50" in planned.found
    assert cluster.judge_network(context, {0: []}).level is Level.ok


def test_files_that_come_late_and_locks_that_do_not_hold(context_of, settings):
    context = context_of(settings("ppo"), nodes=("n0", "n1"))
    good = cluster.Files(seen_after_seconds=0.01, write_seconds=0.001, rate=1e9, locks_hold=True)
    assert cluster.judge_filesystem(context, {0: good, 1: good}).level is Level.ok
    late = cluster.judge_filesystem(context, {0: good, 1: replace(good, seen_after_seconds=4.0)})
    assert late.level is Level.warning and "(n1)" in late.found
    unlocked = cluster.judge_filesystem(context, {0: good, 1: replace(good, locks_hold=False)})
    assert unlocked.level is Level.warning and "rank 1 on n1: got a lock" in unlocked.found


def test_servers_that_cannot_be_reached_or_share_a_port(context_of, settings):
    job = settings("ppo")
    good, bad = {}, {"critic": "10.0.0.1:4000 (n0) cannot be reached: refused"}
    context = context_of(job, nodes=("n0", "n1"))
    assert cluster.judge_ports(context, {0: good, 1: good}).level is Level.ok
    found = cluster.judge_ports(context, {0: good, 1: bad})
    assert found.level is Level.fatal and found.found.startswith("rank 1 on n1: critic: 10.0.0.1:4000 (n0) cannot be reached")
    clash = context_of(settings("ppo", {"critic.server.port": 8000, "reward.server.port": 8000}))
    assert cluster.judge_ports(clash, {0: good}).level is Level.fatal
    assert cluster.judge_ports(context_of(settings("sft")), {0: {}}).found == "this run has no servers"


def test_ranks_that_do_not_fit_the_config(context_of, settings):
    job = settings("ppo", {"num_processes": 2})
    by_size = {}
    for size in (1, 2, 3, 4):
        context = context_of(job, nodes=("n0",) * size)
        by_size[size] = ranks.judge_config(context, dict.fromkeys(range(size), "f")).level
    # a component's 1 or 2 ranks, and all 4 of them, are what the config wants
    assert by_size == {1: Level.ok, 2: Level.ok, 3: Level.warning, 4: Level.ok}
    indivisible = context_of(settings("ppo", {"num_processes": 3, "parallel.tp": 2}))
    found = ranks.judge_config(indivisible, {0: "f"})
    assert found.level is Level.fatal and found.found.startswith("actor: parallel.tp=2 does not divide")
    context = context_of(job, nodes=("n0", "n1"))
    differs = ranks.judge_config(context, {0: "f", 1: "g"})
    assert differs.level is Level.fatal and differs.found.startswith("rank 1 on n1: another config than rank 0")


def test_ranks_that_are_spread_unevenly(context_of):
    context = context_of(nodes=("n0", "n0", "n1"))
    places = dict.fromkeys(range(3), {"world_size": 3, "started_by": "slurm"})
    found = ranks.judge_ranks(context, places)
    assert found.level is Level.warning and "unevenly spread (n1: 1, n0: 2)" in found.found
    stray = ranks.judge_ranks(context, places | {2: places[2] | {"world_size": 1}})
    assert stray.level is Level.fatal and stray.found == "rank 2 on n1 expected 1 ranks, rank 0 3"


PLAN = {
    "problems": [],
    "components": {
        "actor": {"peak_bytes": 70 * GIB, "limit_bytes": 80 * GIB, "parameters": 1000, "dtype": "bfloat16", "micro_batches": {}},
        "critic": {"peak_bytes": 60 * GIB, "limit_bytes": 80 * GIB, "parameters": 100, "dtype": "float32", "micro_batches": {}},
        "reward": {"peak_bytes": 30 * GIB, "limit_bytes": 80 * GIB, "parameters": 100, "dtype": "bfloat16", "micro_batches": None},
    },
}


def test_a_plan_gives_the_size_of_checkpoints(context_of, settings):
    job = settings("ppo")
    plan = sizing.read_plan(PLAN, job)
    assert plan.checkpoint == {"actor": 1000 * (2 + 12), "critic": 100 * (4 + 12)}  # the frozen reward model is not saved
    found = sizing.judge_plan(context_of(job), {0: plan})
    assert found.level is Level.ok and found.figures["checkpoint_bytes"] == 15600
    assert sizing.judge_plan(context_of(job), {0: replace(plan, peak={"actor": 79 * GIB})}).level is Level.warning
    too_large = sizing.judge_plan(context_of(job), {0: replace(plan, problems=["actor: too much"])})
    assert too_large.level is Level.fatal and too_large.found == "actor: too much"


@pytest.mark.parametrize(
    ("free", "values", "level"),
    [
        (4000, {"loop.save_every": 10, "loop.save_minutes": 0}, Level.ok),  # 100 steps: ten checkpoints of 400
        (3999, {"loop.save_every": 10, "loop.save_minutes": 0}, Level.warning),
        (4800, {"loop.save_every": 10}, Level.ok),  # and the newest two by time
        (4799, {"loop.save_every": 10}, Level.warning),
        (799, {"loop.save_every": 10}, Level.fatal),  # not even two
        (800, {"loop.save_every": 10, "checkpoint.keep": 1}, Level.ok),  # the one that stays and the one that is written
        (1200, {}, Level.ok),  # two by time and the one at the end
        (1199, {}, Level.warning),
        (400, {"loop.save_minutes": 0}, Level.ok),  # only at the end
        (399, {}, Level.fatal),
    ],
)
def test_free_space(context_of, settings, free, values, level):
    context = context_of(settings("ppo", values))
    context.findings["plan"] = Finding(level=Level.ok, found="", figures={"checkpoint_bytes": 400.0})
    assert sizing.judge_space(context, {0: free}).level is level


def test_summary_and_json():
    findings = {
        "ranks": Finding(level=Level.ok, found="one", figures={"ranks": 1.0}),
        "data": Finding(level=Level.warning, found="bad lines"),
        "plan": Finding(level=Level.fatal, found="no", advice="use less"),
    }
    assert summary(findings) == "not ready: plan: no -> use less (1 warning: data)"
    assert '"ready": false' in to_json("ppo", findings) and '"level": "fatal"' in to_json("ppo", findings)
    del findings["plan"]
    assert summary(findings) == "ready (1 warning: data)"
    findings = {
        "data": Finding(level=Level.fatal, found="x.jsonl:3: no JSON\nx.jsonl:9: no JSON" + " and so on" * 50, advice="mend it"),
        "plan": Finding(level=Level.fatal, found="needs 3 GiB more"),
    }
    line = summary(findings)
    assert line.startswith("not ready: data: x.jsonl:3: no JSON x.jsonl:9: no JSON and so on")
    assert line.endswith("[...] -> mend it; plan: needs 3 GiB more") and len(line) < 400 and "\n" not in line


def test_the_table_grows_row_by_row_and_has_no_blanks_at_the_ends_of_lines():
    rows = {
        "ranks": Finding(level=Level.ok, found="two\n[lines]", advice="none", seconds=0.5),
        "filesystem": Finding(level=Level.not_run, found="a long story " * 9),
    }
    whole, piecemeal = StringIO(), StringIO()
    show(rows, Console(file=whole, width=80))
    for name, finding in rows.items():
        show({name: finding}, Console(file=piecemeal, width=80), has_header=name == "ranks")
    lines = whole.getvalue().splitlines()
    assert piecemeal.getvalue() == whole.getvalue()
    assert [line for line in lines if line != line.rstrip() or len(line) > 80] == []
    assert lines[0].split() == ["item", "time", "found,", "and", "what", "to", "do"]
    assert lines[1].split() == ["ranks", "ok", "500", "ms", "two"] and [line.strip() for line in lines[2:4]] == ["[lines]", "-> none"]


def test_items_need_only_what_comes_before_them():
    seen: set[str] = set()
    for item in ITEMS:
        assert set(item.needs) <= seen, item.name
        seen.add(item.name)


def test_the_choice_of_items():
    names = lambda **options: [item.name for item in chosen(PreflightOptions(**options))]  # noqa: E731
    assert names(only="data") == ["ranks", "config", "hub", "data"]
    assert "engine" not in names() and "engine" in names(engine=True) and "engine" in names(only="engine")
    with pytest.raises(ValueError, match="--only dta: not an item; allowed: ranks, config"):
        chosen(PreflightOptions(only="dta"))
