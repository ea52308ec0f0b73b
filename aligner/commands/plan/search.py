"""`aligner plan --search`: what everything that is free in a job should be, for a number of GPUs or for a deadline.

The search works on estimates (`aligner.planner.job_search`); what it shows has been planned in full with the settings that it prints.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from aligner.algorithms.registry import composed, recipe_of
from aligner.cluster.component import Placement
from aligner.commands.calibrate import fit
from aligner.commands.parts import LaunchOptions, PlanOptions
from aligner.commands.plan.command import DOES_NOT_FIT, components, load, plan, plan_config, with_lengths
from aligner.commands.plan.outputs import config_and_overrides, write_outputs
from aligner.commands.slurm import launch_slurm
from aligner.errors import ConfigError
from aligner.losses.correction import Correction
from aligner.planner import report
from aligner.planner.job_search import Arrangement, Candidate, JobSearch, undominated
from aligner.planner.report import Found, Row
from aligner.planner.search import Estimator, Space, written
from aligner.planner.workload import Component
from aligner.run.settings import JobRun
from aligner.settings.command_line import override
from aligner.settings.compose import as_file, search_path

MOST_GPUS = 4096  # that a deadline is tried with
TRIES = 6  # full plans of an arrangement, until one fits
CLOSE = 1.05  # an arrangement whose estimate is up to this factor above the best full plan may still turn out to be better
COMPARED = 3  # full plans of an arrangement that fit, among which the fastest is shown, on the largest number of GPUs
STALENESS = "rollout.asynchronous.max_staleness"
HOURS = {"d": 24.0, "h": 1.0, "m": 1 / 60}

T = TypeVar("T")


def run(name: str, overrides: Sequence[str], options: PlanOptions) -> int:
    """`aligner plan`: calibrate, search, or plan the config, the run in the directory `name`, or the run to compare with."""
    if options.calibrate is not None:
        return fit(options.calibrate)
    name, overrides = config_and_overrides(name, overrides, options.against)
    if options.search or options.gpus or options.deadline:
        return search(name, overrides, options)
    for unused in ("steps", "write"):
        if value := getattr(options, unused):
            raise ConfigError(f"--{unused} {value}: needs --search")
    return plan(name, overrides, options)


def hours(options: PlanOptions) -> float:
    """The deadline's hours; 0: none. Raises ConfigError for a text that is not a duration, or without steps."""
    given = f"--deadline {options.deadline}"
    if not options.deadline:
        return 0.0
    if not re.fullmatch(r"(\d+(\.\d+)?[dhm])+", options.deadline):
        raise ConfigError(f"{given}: allowed: a duration in days, hours or minutes, such as 2d, 24h or 90m")
    if not options.steps:
        raise ConfigError(f"{given}: needs --steps N, the training steps that it is for")
    found = sum(float(number) * HOURS[unit] for number, _, unit in re.findall(r"(\d+(\.\d+)?)([dhm])", options.deadline))
    if not found:
        raise ConfigError(f"{given}: must be above 0")
    return found


def search(name: str, overrides: Sequence[str], options: PlanOptions) -> int:
    """Search, print the tables, write the best job; returns the exit code: 1 if nothing fits, or meets the deadline."""
    deadline = hours(options)
    if options.write is not None:
        check_writable(options.write, name, overrides)
    begun = time.monotonic()
    found = _Search(name, overrides, options).found(deadline)
    report.show_search(found, report.console(), top=options.top, took=time.monotonic() - begun)
    if found.best is not None:
        write_outputs(found.best.job, options)
    if options.write is not None and found.best is not None:
        write(options.write, name, overrides, found.best, steps=options.steps)
    if options.json_path is not None:
        options.json_path.write_text(report.search_to_json(found))
    return 0 if found.best is not None else DOES_NOT_FIT


class _Search:
    """The fastest jobs for numbers of GPUs, each planned in full."""

    def __init__(self, name: str, overrides: Sequence[str], options: PlanOptions) -> None:
        self.name, self.options, self.config = name, options, load(name, overrides)
        cluster = self.config.cluster
        self.space = Space(cluster=cluster, main=self.config.traits().role, typed=_typed(overrides, self.config))
        estimator, arrangements = Estimator(cluster), list(_arrangements(self.config, self.space))
        # Updates by the host are slow: they are tried only if nothing fits without them.
        spaces = (self.space, replace(self.space, host_updates=True))
        self.searches = [[JobSearch(one, space, estimator) for one in arrangements] for space in spaces]

    def found(self, deadline: float) -> Found:
        """Raises ConfigError as `search` does."""
        most, steps = self._most(deadline), self.options.steps or 1000
        rows: list[Row] = []
        alternatives: list[Row] = []
        for gpus in self.space.sizes(most):
            is_last = gpus == most
            own = self.rows(gpus, all_of_them=is_last)
            makes_it = bool(deadline and own) and own[0].seconds * steps <= deadline * 3600
            if makes_it and not is_last:
                own = self.rows(gpus, all_of_them=True)
            rows += own[:1]
            alternatives = own if is_last or makes_it else alternatives
            if makes_it:
                break
        best = min(rows, key=lambda row: (row.seconds, row.gpus), default=None)
        late = best is not None and bool(deadline) and best.seconds * steps > deadline * 3600
        return Found(
            name=self.name,
            cluster=self.config.cluster,
            most=most,
            steps=steps,
            deadline=deadline,
            rows=tuple(undominated(rows, lambda row: (row.gpus, row.seconds))),
            alternatives=tuple(alternatives),
            opt_in=tuple(self._in_8_bits(best)) if best is not None else (),
            best=None if late else best,
        )

    def _most(self, deadline: float) -> int:
        node = self.space.cluster.gpus_per_node
        if not self.options.gpus:
            return MOST_GPUS // node * node if deadline else self._of_config()
        gpus = self.options.gpus
        if gpus < 1 or (gpus % node if gpus > node else node % gpus):
            parts = [size for size in range(1, node) if node % size == 0]
            allowed = ", ".join(map(str, [*parts, node, 2 * node, 3 * node]))
            raise ConfigError(f"--gpus {gpus}: must fill nodes of cluster.gpus_per_node={node}; allowed: {allowed}, ...")
        return gpus

    def _of_config(self) -> int:
        """GPUs of the config's own job."""
        found = [one.num_ranks for one in components(self.config, checked=False) if not one.within]
        most = max(found) if self.config.server_placement is Placement.colocated else sum(found)
        node = self.space.cluster.gpus_per_node
        return most if most <= node else most // node * node

    def rows(self, gpus: int, *, all_of_them: bool) -> list[Row]:
        """The fastest job of each arrangement (unless `all_of_them`, only of those that may be the fastest), fastest first."""
        return next((found for searches in self.searches if (found := self._rows(searches, gpus, all_of_them=all_of_them))), [])

    def _rows(self, searches: Sequence[JobSearch], gpus: int, *, all_of_them: bool) -> list[Row]:
        estimated = [candidates for one in searches if (candidates := one.candidates(gpus))]
        found: list[Row] = []
        for candidates in sorted(estimated, key=lambda candidates: candidates[0].seconds):
            if not all_of_them and found and candidates[0].seconds > CLOSE * min(row.seconds for row in found):
                break
            verified = self._verified(candidates, COMPARED if all_of_them else 1)
            found += [min(verified, key=lambda row: (row.seconds, row.gpus))] if verified else []
        return sorted(found, key=lambda row: (row.seconds, row.gpus))

    def _verified(self, candidates: Sequence[Candidate], enough: int) -> list[Row]:
        """The first `enough` candidates that fit in full. An option that did not fit in one job is not tried in another."""
        failed, tries, found = set[int](), 0, list[Row]()
        for candidate in candidates:
            if any(id(option) in failed for option in candidate.options):
                continue
            settings = candidate.settings(self.space)
            job = self.evaluate(settings)
            if job is not None and not job.problems:
                found.append(Row(settings=settings, words=candidate.arrangement.words, job=job))
                if len(found) == enough:
                    break
                continue
            if (tries := tries + 1) == TRIES:
                break
            unfit = {plan.component.process for plan in job.components if not plan.fits} if job is not None else set[str]()
            failed |= {id(option) for option in candidate.options if not unfit or option.component.name in unfit}
        return found

    def evaluate(self, settings: Mapping[str, str]) -> report.JobPlan | None:
        """The full plan of the job with these settings; None if a run would refuse them."""
        try:
            config = with_settings(self.config, settings)
            return plan_config(self.name, config, advises=False)
        except ConfigError:
            return None

    def _in_8_bits(self, best: Row) -> Iterator[Row]:
        """The best job with FP8 on a cluster that has it: it changes numbers, so it is shown but never chosen."""
        keys = [self.space.key(plan.component, "model.fp8") for plan in best.job.components]
        if not self.space.cluster.fp8_tflops or self.config.model.fp8 or not all(map(self.space.is_free, keys)):
            return
        settings = {**best.settings, **dict.fromkeys(keys, "true")}
        job = self.evaluate(settings)
        if job is not None and not job.problems:
            words = ", ".join(filter(None, (best.words, "the best one in FP8, if you type model.fp8=true")))
            yield Row(settings=settings, words=words, job=job)


def _typed(overrides: Sequence[str], config: JobRun) -> frozenset[str]:
    """The settings that were given; a preset of a section, such as model=llama3_8b, leaves it free."""
    given = {key.lstrip("+~"): value for key, _, value in (text.partition("=") for text in overrides)}
    sections = {field.name for field in fields(config) if is_dataclass(getattr(config, field.name))}
    return frozenset(key for key, value in given.items() if key not in sections or value.startswith("{"))


def _arrangements(config: JobRun, space: Space) -> Iterator[Arrangement]:
    """Every way to share GPUs, and to sample, that the recipe has and the typed settings leave open."""
    served = [server for server in config.servers() if server.work is not None]
    guests = [server.guest for server in config.servers() if server.guest is not None]
    has_engine, critic = config.traits().has_engine, getattr(config, "critic", None)
    combines = critic is not None and len(served) + len(guests) > 1
    staleness = config.rollout.asynchronous.max_staleness if has_engine else 0
    now: dict[str, Any] = {
        "placement": config.server_placement,
        "critic.with_reward": critic is not None and critic.with_reward,
        STALENESS: staleness,
    }
    options: dict[str, list[Any]] = {
        "placement": list(Placement) if served else [],
        "critic.with_reward": [False, True] if combines else [],
        STALENESS: [0, staleness or 1] if has_engine else [],
    }
    for values in product(*(space.choose(key, now[key], own) if own else [now[key]] for key, own in options.items())):
        chosen = dict(zip(options, values, strict=True))
        settings = {key: value for key, value in chosen.items() if options[key]} | _correction(config, space, chosen[STALENESS])
        typed = {name: written(value) for name, value in settings.items() if attrgetter(name)(config) != value}
        try:
            changed = with_settings(config, {**typed, **_fitting(config, chosen)})
            found = with_lengths(components(changed, checked=False), config.plan)
        except ConfigError:  # the recipe cannot
            continue
        yield _arrangement(found, typed, chosen)


def _fitting(config: JobRun, chosen: Mapping[str, Any]) -> dict[str, str]:
    """Settings that an arrangement cannot be composed without and the search sets later: room for the servers, weights that stay."""
    most = max([config.num_processes, *(server.num_ranks for server in config.servers())])
    found = {"num_processes": str(most)} if chosen["placement"] is Placement.colocated else {}
    return found | ({"rollout.offload": "false"} if chosen[STALENESS] else {})


def _correction(config: JobRun, space: Space, staleness: int) -> dict[str, Any]:
    """Rollouts of older policies need an importance correction, if the recipe has one."""
    correction, key = getattr(getattr(config, "algorithm", None), "correction", None), "algorithm.correction.kind"
    needs_it = staleness and correction is not None and correction.kind is Correction.none and space.is_free(key)
    return {key: Correction.tis} if needs_it else {}


def _arrangement(found: Sequence[Component], typed: Mapping[str, str], chosen: Mapping[str, Any]) -> Arrangement:
    staleness = chosen[STALENESS]
    words = [chosen["placement"].value] if any(one is not found[0] and one.owns_layout for one in found) else []
    words += ["critic and reward in one"] if chosen["critic.with_reward"] else []
    words += [f"sampling up to {staleness} steps ahead" if staleness > 1 else "sampling a step ahead"] if staleness else []
    return Arrangement(
        words=", ".join(words),
        settings=typed,
        components=tuple(one for one in found if not one.within),
        guests={one.within: one for one in found if one.within},
        colocated=chosen["placement"] is Placement.colocated,
        asynchronous=bool(staleness),
    )


def with_settings(config: JobRun, settings: Mapping[str, str]) -> JobRun:
    """The config with plain settings as they are typed. Every changed section is built, and checks itself, anew. Raises ConfigError."""
    return _replaced(copy.deepcopy(config), settings)


def _replaced(section: T, settings: Mapping[str, str]) -> T:
    assert is_dataclass(section) and not isinstance(section, type)
    parts = [(name, rest, text) for key, text in settings.items() for name, _, rest in [key.partition(".")]]
    changed: dict[str, Any] = {}
    for name in {field.name for field in fields(section) if field.init} & {name for name, _, _ in parts}:
        now, own = getattr(section, name), {rest: text for other, rest, text in parts if other == name}
        changed[name] = _replaced(now, own) if "" not in own else _read(now, own[""])
    return replace(section, **changed)


def _read(now: Any, text: str) -> Any:
    if isinstance(now, bool):
        return text == "true"
    return type(now)(text) if isinstance(now, (Enum, int, float)) else text


def check_writable(folder: Path, name: str, overrides: Sequence[str]) -> None:
    """Raise ConfigError, before a search, for what `write` could not write."""
    if composed(name, ["data.train=given-later", *overrides]).slurm.separate:
        raise ConfigError(
            f"--write {folder}: with slurm.separate=true a run is several jobs, which no single script submits; leave one out"
        )
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--write {folder}: is not a directory")


def write(folder: Path, name: str, overrides: Sequence[str], best: Row, *, steps: int) -> str:
    """Write `<name>_<gpus>_gpus.yaml` on top of config `name`, and its `.sub`, to `folder`; returns its name. `steps`: loop.max_steps."""
    places, typed = search_path(overrides)
    chosen = f"{name}_{best.gpus}_gpus"
    keys = {text.partition("=")[0] for text in typed}
    more = dict(best.settings)
    if "run.directory" not in keys:
        more["run.directory"] = f"runs/{chosen}"
    if steps and "loop.max_steps" not in keys and best.job.components[0].component.optimizer is not None:
        more["loop.max_steps"] = str(steps)
    folders = [*recipe_of(name, overrides).folders(), *(place for place in places if isinstance(place, Path))]
    comment = f"{name} on {best.gpus} GPUs, as found by `aligner plan {name} --search`: {report.seconds(best.seconds)} a step."
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{chosen}.yaml"
    path.write_text(as_file(name, typed, more, folders, comment=comment))
    print(f"written to {path}; look at it with: aligner plan {chosen} --config-dir {folder}", flush=True)
    others = [f"file://{place.resolve()}" if isinstance(place, Path) else place for place in places]
    launch_slurm(
        chosen, [override("hydra.searchpath", [*others, f"file://{folder.resolve()}"])], LaunchOptions(output=folder / f"{chosen}.sub")
    )
    return chosen
