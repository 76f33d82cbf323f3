"""Run a table or figure of the paper: its suite of runs, on this machine or on a Slurm cluster.

    # the commands, and what they cost
    python benchmark/sweep.py dmc100k --dry-run
    python benchmark/sweep.py ablation_decoder --only reacher-easy --workers 2
    python benchmark/sweep.py atari100k --cluster slurm --partition gpu --gpu-type a100
    # any flag of the script can follow
    python benchmark/sweep.py dmc100k --preset laptop --total-timesteps 20000

Repeat the same command as often as you like: finished runs are skipped, interrupted ones continue.
"""

import contextlib
import csv
import dataclasses
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import tqdm
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import mooss_common as common
import rainbow_mooss_atari
import sac_mooss_dmc

PAPER_SCORES = json.loads((ROOT / "benchmark" / "paper_scores.json").read_text())
GAMES = tuple(game for game in PAPER_SCORES["atari100k"] if not game.startswith("_"))
TASKS = tuple(PAPER_SCORES["dmc100k"])[:6]
HARD_TASKS = ("reacher-hard", "walker-run")
VARIANTS = {  # --exp-name and the flags that make it; `mooss` is shared by all suites
    "base": {"aux_weight": 0},
    "mooss": {},
    "L0_p0": {"temporal_window": 0, "mask_ratio": 0},
    "L6_p0": {"temporal_window": 6, "mask_ratio": 0},
    "cube": {"mask_type": "cube"},
    **{f"decoder_{inputs}": {"decoder_inputs": inputs} for inputs in ("none", "s", "sar")},
    **{f"depth{depth}": {"decoder_depth": depth} for depth in (1, 3, 4)},
    **{f"window{window}": {"temporal_window": window} for window in (0, 2, 4, 8)},
    **{f"mask{percent}": {"mask_ratio": percent / 100} for percent in (10, 30, 70, 90)},
}
BOTH = ("base", "mooss")
COMPONENTS = ("base", "L0_p0", "L6_p0", "cube", "mooss")
DECODERS = ("decoder_none", "decoder_s", "decoder_sar", "mooss")
DEPTHS = ("depth1", "mooss", "depth3", "depth4")
WINDOWS = ("window0", "window2", "window4", "mooss", "window8")
MASK_RATIOS = ("mask10", "mask30", "mooss", "mask70", "mask90")  # the paper does not give its own
SUITES = {  # script, tasks, variants, steps
    "dmc100k": (sac_mooss_dmc, TASKS, BOTH, 100_000),
    "dmc500k": (sac_mooss_dmc, TASKS, BOTH, 500_000),
    "dmc_hard": (sac_mooss_dmc, HARD_TASKS, BOTH, 500_000),
    "atari100k": (rainbow_mooss_atari, GAMES, BOTH, 100_000),
    "ablation_components": (sac_mooss_dmc, TASKS, COMPONENTS, 100_000),
    "ablation_decoder": (sac_mooss_dmc, TASKS, DECODERS, 100_000),
    "ablation_depth": (sac_mooss_dmc, TASKS, DEPTHS, 100_000),
    "ablation_window": (sac_mooss_dmc, TASKS, WINDOWS, 100_000),
    "ablation_mask_ratio": (sac_mooss_dmc, TASKS, MASK_RATIOS, 100_000),
}


@dataclasses.dataclass
class SweepArgs:
    """Run a suite of the paper. Flags that are not listed here go to the script as they are."""

    suite: tyro.conf.Positional[Literal[tuple(SUITES)]]  # table or figure of the paper
    seeds: tuple[int, ...] = (1, 2, 3)  # a run for each
    only: tuple[str, ...] = ()  # only these tasks or games
    variants: tuple[str, ...] = ()  # only these variants of the suite
    preset: str = "paper"  # preset of the script
    run_root: str = "runs"  # folder that holds the run folders
    dry_run: bool = False  # print the commands and what they cost
    # for the cost (DMC at full size: 1.5, as the authors' logs show)
    seconds_per_update: float | None = None
    cluster: Literal["local", "slurm"] = "local"  # where to run
    # local: runs at a time, each with a GPU (in turn) or a share of the cores
    workers: int = 1
    threads: int = 0  # CPU threads of a run (0: cores / workers; on Slurm 8)
    partition: str | None = None  # Slurm partition
    account: str | None = None  # Slurm account
    gpu_type: str | None = None  # Slurm GPU type, as in --gres=gpu:TYPE:1
    gpus: int = 1  # Slurm GPUs of a run; 0: a run on CPUs
    memory_gb: int = 32  # Slurm memory of a run
    # Slurm time limit; a run that reaches it checkpoints and requeues itself
    time_hours: float = 24.0
    signal_seconds: int = 120  # Slurm: time to checkpoint before the limit
    parallelism: int = 64  # Slurm array parallelism
    wait: bool = True  # Slurm: stay and show the live table


RANGES = {
    "workers memory_gb parallelism": (1, 10_000),
    "threads gpus signal_seconds": (0, 10_000),
    "time_hours": (0.01, 10_000),
}


@dataclasses.dataclass
class Run:
    """One command of a suite, and where it stands."""

    name: str
    command: list
    path: str
    total: int  # steps
    eval_episodes: int
    updates: int
    state: str = "queued"
    first_step: int = 0  # at which step this sweep started it
    missing: int = 0  # how often in a row Slurm did not list it

    def progress(self):
        """Last step in the run's files, mean return of its last evaluation, whether it ended."""
        step = 0
        scores = {}
        for name in ("train.csv", "eval.csv"):
            for row in read_rows(Path(self.path) / name):
                step = max(step, row["step"])
                if row.get("length"):  # the last column: a whole row of eval.csv
                    scores.setdefault(row["step"], []).append(float(row["return"]))
        if not scores:
            return step, None, False
        last = scores[max(scores)]
        finished = max(scores) >= self.total and len(last) >= self.eval_episodes
        return step, sum(last) / len(last), finished

    def log_file(self):
        return Path(self.path).parent / "logs" / f"{self.name}.log"


def read_rows(path):
    """The rows of a run's CSV file that can be read; the script itself judges damaged files."""
    rows = []
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, csv.Error):
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                row["step"] = int(row["step"])
                float(row.get("return") or 0)
                rows.append(row)
    return rows


def build_runs(args, passed):
    """The runs of a suite, in its order; the script's own parser and checks read the flags."""
    module, tasks, variants, steps = SUITES[args.suite]
    for task in args.only:
        common.require_known("--only", task, tasks)
    for variant in args.variants:
        common.require_known("--variants", variant, variants)
    runs = []
    for variant, task, seed in itertools.product(
            args.variants or variants, args.only or tasks, args.seeds):
        own = [word for name, value in VARIANTS[variant].items()
               for word in (common.flag(name), str(value))]
        flags = [
            "--env-id", task, "--seed", str(seed), "--exp-name", variant,
            "--run-root", args.run_root, "--preset", args.preset,
            "--total-timesteps", str(steps), *own, *passed, "--resume"]
        parsed = common.parse_args(module.Args, module.fill_presets, flags)
        resolved = module.resolve_args(parsed)
        path = refuse_other_flags(module, resolved)
        command = [sys.executable, module.__file__, *flags]
        runs.append(Run(path.name, command, str(path), resolved.total_timesteps,
                        resolved.eval_episodes, count_updates(resolved)))
    return runs


def refuse_other_flags(module, args):
    """The run's folder; refused before anything starts if a run with other flags is in it.

    A run that is not begun or damaged is left to the script.
    """
    # The length of a DMC run may change, as its script says.
    may_change = ("total_timesteps",) if module is sac_mooss_dmc else ()
    folder = common.RunFolder(args, module.__file__, may_change)
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        before = json.loads((folder.path / "args.json").read_text())
        folder.refuse_other_args(folder.path, before)
    return folder.path


def count_updates(args):
    if hasattr(args, "updates_per_step"):
        learning = max(0, args.total_timesteps - args.min_replay)
        return learning // args.replay_period * args.updates_per_step
    agent_steps = -(-args.total_timesteps // args.action_repeat)
    return max(0, agent_steps - args.init_steps)


# ---------------------------------------------------------------------------------- the live table
def count_states(runs):
    states = [run.state for run in runs]
    known = ("queued", "running", "done", "failed")
    return "  ".join(f"{states.count(state)} {state}" for state in known)


def last_return(score):
    return "" if score is None else f"return {score:.1f}"


class LiveTable:
    """A line for each running run, drawn by tqdm; without a terminal some lines now and then."""

    LINE = "{desc} {percentage:3.0f}% of {total:,}{postfix}  ETA {remaining}{bar:0}"

    def __init__(self):
        self.live = sys.stdout.isatty()
        self.states = None
        self.shown = 0.0
        self.bars = {}

    def show(self, runs):
        states = [run.state for run in runs]
        every = 1 if self.live else 60
        if states == self.states and time.time() - self.shown < every:
            return
        self.states = states
        self.shown = time.time()
        if self.live:
            self.draw(runs)
            return
        for run in runs:
            if run.state in ("running", "failed"):
                step, score, _ = run.progress()
                print(f"{run.state:8} {run.name}  step {step:,}/{run.total:,}  "
                      f"{last_return(score)}")
        print(count_states(runs), flush=True)

    def draw(self, runs):
        if "" not in self.bars:  # the line of counts, above the runs
            self.bars[""] = self.line("{desc}")
        self.bars[""].set_description_str(count_states(runs))
        for run in runs:
            if run.state == "running":
                step, score, _ = run.progress()
                if run.name not in self.bars:
                    self.bars[run.name] = self.line(
                        self.LINE, desc=run.name, total=run.total, initial=run.first_step)
                bar = self.bars[run.name]
                bar.set_postfix_str(last_return(score), refresh=False)
                bar.n = step
                bar.refresh()
            elif run.name in self.bars:
                self.bars.pop(run.name).close()
                tqdm.tqdm.write(f"{run.state:8} {run.name}  {last_return(run.progress()[1])}")

    @staticmethod
    def line(bar_format, **settings):
        return tqdm.tqdm(bar_format=bar_format, leave=False, dynamic_ncols=True, file=sys.stdout,
                         **settings)

    def close(self, runs):
        for bar in self.bars.values():
            bar.close()
        if self.live:
            print(count_states(runs))


def finish(runs, args):
    """Say how failed runs ended and what to type next; the exit code."""
    failed = [run for run in runs if run.state == "failed"]
    for run in failed:
        tail = ["(no log)"]
        if run.log_file().is_file():
            tail = run.log_file().read_text(errors="replace").splitlines()[-8:]
        print(f"\n{run.name} failed; the end of {run.log_file()}:\n  " + "\n  ".join(tail),
              file=sys.stderr)
    if any(run.state == "done" for run in runs):
        report = os.path.relpath(ROOT / "benchmark" / "report.py")
        words = ["python", report, args.run_root, "--out", "report"]
        print(f"the paper's numbers beside these: {shlex.join(words)}")
    return 1 if failed else 0


# ------------------------------------------------------------------------------------------- local
def start(run, environment):
    """Start a run's process, its output appended to its log."""
    run.log_file().parent.mkdir(parents=True, exist_ok=True)
    run.state = "running"
    run.first_step = run.progress()[0]
    with open(run.log_file(), "a") as log:
        return subprocess.Popen(
            run.command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def run_locally(runs, args):
    import torch

    gpus = torch.cuda.device_count()
    threads = args.threads or max(1, (os.cpu_count() or 1) // args.workers)
    waiting = [run for run in runs if run.state == "queued"]
    active = {}
    live = LiveTable()
    stop = common.StopRequest()
    told = False
    while active or (waiting and not stop.signal):
        for worker in range(args.workers):
            if worker not in active and waiting and not stop.signal:
                environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
                if gpus and "CUDA_VISIBLE_DEVICES" not in os.environ:
                    environment["CUDA_VISIBLE_DEVICES"] = str(worker % gpus)
                run = waiting.pop(0)
                active[worker] = run, start(run, environment)
        if stop.signal and not told:  # once: every run checkpoints and leaves
            told = True
            for _, process in active.values():
                process.send_signal(signal.SIGTERM)
        for worker, (run, process) in list(active.items()):
            code = process.poll()
            if code is None:
                continue
            interrupted = stop.signal and (code >= 128 or code < 0)
            run.state = "done" if code == 0 else "queued" if interrupted else "failed"
            del active[worker]
        live.show(runs)
        time.sleep(0.2)
    live.close(runs)
    stop.close()
    if stop.signal:
        print("stopped: repeat the same command to go on")
        return 128 + stop.signal
    return finish(runs, args)


# ------------------------------------------------------------------------------------------- Slurm
class SlurmRun:
    """What a Slurm task does.

    Before the time limit, and when a job is preempted, Slurm sends SIGUSR2 and submitit calls
    `checkpoint`: the script gets the signal too, saves and leaves, and the job is queued again.
    """

    def __call__(self, run):
        threads = os.environ.get("SLURM_CPUS_PER_TASK", "1")
        self.process = start(run, {**os.environ, "OMP_NUM_THREADS": threads})
        code = self.end()
        if code != 0:
            raise RuntimeError(f"{run.name} ended with exit code {code}; see {run.log_file()}")

    def end(self):
        """Exit code of the script. Popen.wait would hold a lock that the handler below needs."""
        while self.process.poll() is None:
            time.sleep(0.2)
        return self.process.returncode

    def checkpoint(self, run):
        import submitit

        self.process.send_signal(signal.SIGUSR2)
        self.end()
        return submitit.helpers.DelayedSubmission(SlurmRun(), run)


def submit(runs, args):
    """One array job for all runs."""
    import submitit

    logs = Path(args.run_root) / "logs" / "slurm"
    executor = submitit.SlurmExecutor(folder=logs, max_num_timeout=1000)
    gres = f"gpu:{args.gpu_type}:{args.gpus}" if args.gpu_type else f"gpu:{args.gpus}"
    executor.update_parameters(
        job_name=f"mooss_{args.suite}", partition=args.partition,
        time=max(1, round(60 * args.time_hours)), mem=f"{args.memory_gb}GB",
        cpus_per_task=args.threads or 8, gres=gres if args.gpus else None,
        signal_delay_s=args.signal_seconds, array_parallelism=args.parallelism,
        additional_parameters={"account": args.account} if args.account else {})
    return executor.map_array(SlurmRun(), runs)


def run_on_slurm(runs, args):
    waiting = [run for run in runs if run.state == "queued"]
    if not waiting:
        return finish(runs, args)
    jobs = submit(waiting, args)
    array = jobs[0].job_id.split("_")[0]
    print(f"submitted {len(jobs)} runs as Slurm array {array}")
    if not args.wait:
        return 0
    live = LiveTable()
    while any(run.state in ("queued", "running") for run in waiting):
        listed = subprocess.run(
            ["squeue", "--noheader", "--array", "--format=%i %T", "--jobs", array],
            capture_output=True, text=True)
        states = dict(line.split() for line in listed.stdout.splitlines())
        answered = listed.returncode == 0 or "Invalid job id" in listed.stderr
        for run, job in zip(waiting, jobs):
            if run.state in ("queued", "running"):
                follow(run, states.get(job.job_id), answered)
        live.show(runs)
        time.sleep(2)
    live.close(runs)
    return finish(runs, args)


def follow(run, state, answered):
    """Take over what Slurm says of a run: its state, or None where it is not listed."""
    run.missing = run.missing + 1 if answered and state is None else 0
    if run.missing and run.progress()[2]:
        run.state = "done"
    elif run.missing > 10:  # requeueing takes a moment
        run.state = "failed"
    elif run.state == "queued" and state == "RUNNING":
        run.state = "running"
        run.first_step = run.progress()[0]
    elif run.state == "running" and state == "PENDING":
        run.state = "queued"  # it gave way and waits for its next turn


# -------------------------------------------------------------------------------------------- main
def print_commands(runs, args):
    for run in runs:
        print(shlex.join(["python", *run.command[1:]]))
    updates = sum(run.updates for run in runs)
    seconds = args.seconds_per_update
    if seconds is None and SUITES[args.suite][0] is sac_mooss_dmc and args.preset != "laptop":
        seconds = 1.5
    cost = "hours with --seconds-per-update (benchmark/speed.py measures it)"
    if seconds:
        cost = f"{updates * seconds / 3600:,.0f} hours at {seconds} s an update"
    print(f"# {len(runs)} runs, {updates:,} updates, {cost}")


def main(argv=None):
    args, passed = tyro.cli(SweepArgs, args=argv, return_unknown_args=True)
    common.check_ranges(args, RANGES)
    runs = build_runs(args, passed)
    if args.dry_run:
        print_commands(runs, args)
        return 0
    for run in runs:
        if run.progress()[2]:
            run.state = "done"
    done = sum(run.state == "done" for run in runs)
    print(f"{args.suite}: {len(runs)} runs, {done} of them finished already")
    return run_locally(runs, args) if args.cluster == "local" else run_on_slurm(runs, args)


if __name__ == "__main__":
    common.exit_with(main)
