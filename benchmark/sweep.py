"""Run a table or figure of the paper: its suite of runs, on this machine or on a Slurm cluster.

    python benchmark/sweep.py dmc100k --dry-run                               # the commands, and what they cost
    python benchmark/sweep.py ablation_decoder --only reacher-easy --workers 2
    python benchmark/sweep.py atari100k --cluster slurm --partition gpu --gpu-type a100 --time-hours 8
    python benchmark/sweep.py dmc100k --preset laptop --total-timesteps 20000   # any flag of the script can follow

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

import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import mooss_common as common
import rainbow_mooss_atari
import sac_mooss_dmc

PAPER_SCORES = json.loads((ROOT / "benchmark" / "paper_scores.json").read_text())
GAMES = tuple(game for game in PAPER_SCORES["atari100k"] if not game.startswith("_"))
SCRIPTS = {"dmc": sac_mooss_dmc, "atari": rainbow_mooss_atari}
TASKS = ("finger-spin", "cartpole-swingup", "reacher-easy", "cheetah-run", "walker-walk", "ball_in_cup-catch")
HARD_TASKS = ("reacher-hard", "walker-run")
VARIANTS = {  # --exp-name and the flags that make it; `mooss` is shared by all suites
    "base": "--aux-weight 0", "mooss": "",
    "L0_p0": "--temporal-window 0 --mask-ratio 0", "L6_p0": "--temporal-window 6 --mask-ratio 0",
    "cube": "--mask-type cube",
    "decoder_none": "--decoder-inputs none", "decoder_s": "--decoder-inputs s", "decoder_sar": "--decoder-inputs sar",
    "depth1": "--decoder-depth 1", "depth3": "--decoder-depth 3", "depth4": "--decoder-depth 4",
    "window0": "--temporal-window 0", "window2": "--temporal-window 2", "window4": "--temporal-window 4",
    "window8": "--temporal-window 8",
    "mask10": "--mask-ratio 0.1", "mask30": "--mask-ratio 0.3", "mask70": "--mask-ratio 0.7",
    "mask90": "--mask-ratio 0.9",
}
SUITES = {  # script, tasks, variants, steps. The mask ratios are ours: the paper's figure does not give its values.
    "dmc100k": ("dmc", TASKS, ("base", "mooss"), 100_000),
    "dmc500k": ("dmc", TASKS, ("base", "mooss"), 500_000),
    "dmc_hard": ("dmc", HARD_TASKS, ("base", "mooss"), 500_000),
    "atari100k": ("atari", GAMES, ("base", "mooss"), 100_000),
    "ablation_components": ("dmc", TASKS, ("base", "L0_p0", "L6_p0", "cube", "mooss"), 100_000),
    "ablation_decoder": ("dmc", TASKS, ("decoder_none", "decoder_s", "decoder_sar", "mooss"), 100_000),
    "ablation_depth": ("dmc", TASKS, ("depth1", "mooss", "depth3", "depth4"), 100_000),
    "ablation_window": ("dmc", TASKS, ("window0", "window2", "window4", "mooss", "window8"), 100_000),
    "ablation_mask_ratio": ("dmc", TASKS, ("mask10", "mask30", "mooss", "mask70", "mask90"), 100_000),
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
    seconds_per_update: float | None = None  # for the cost (DMC at full size: 1.5, as the authors' logs show)
    cluster: Literal["local", "slurm"] = "local"  # where to run
    workers: int = 1  # local: runs at a time, each with a GPU (in turn) or a share of the cores
    threads: int | None = None  # CPU threads of a run (default: cores / workers; Slurm: 8)
    partition: str | None = None  # Slurm partition
    account: str | None = None  # Slurm account
    gpu_type: str | None = None  # Slurm GPU type, as in --gres=gpu:TYPE:1
    gpus: int = 1  # Slurm GPUs of a run; 0: a run on CPUs
    memory_gb: int = 32  # Slurm memory of a run
    time_hours: float = 24.0  # Slurm time limit; a run that reaches it checkpoints and requeues itself
    signal_seconds: int = 120  # Slurm: time to checkpoint before the limit
    parallelism: int = 64  # Slurm array parallelism
    wait: bool = True  # Slurm: stay and show the live table


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
    began: float = 0.0  # when and at which step this sweep started it
    first_step: int = 0
    missing: int = 0  # how often in a row Slurm did not list it

    def progress(self):
        """Last step in the run's files and the mean return of its last evaluation."""
        step, scores = 0, {}
        for name in ("train.csv", "eval.csv"):
            file = Path(self.path) / name
            if file.is_file():
                with open(file, newline="") as handle:
                    for row in csv.DictReader(handle):
                        if (row["step"] or "").isdigit():
                            step = max(step, int(row["step"]))
                            if name == "eval.csv" and row.get("length"):
                                scores.setdefault(int(row["step"]), []).append(float(row["return"]))
        last = scores.get(max(scores, default=0), [])
        finished = bool(scores) and max(scores) >= self.total and len(last) >= self.eval_episodes
        return step, sum(last) / len(last) if last else None, finished

    def log_file(self):
        return Path(self.path).parent / "logs" / f"{self.name}.log"


def build_runs(args, passed):
    """The runs of a suite, in the order of its table; the script's own parser and checks read the flags."""
    script, tasks, variants, steps = SUITES[args.suite]
    for flag, given, known in (("--only", args.only, tasks), ("--variants", args.variants, variants)):
        for name in given:
            common.require_known(flag, name, known)
    module, runs = SCRIPTS[script], []
    for variant, task, seed in itertools.product(args.variants or variants, args.only or tasks, args.seeds):
        flags = ["--env-id", task, "--seed", str(seed), "--exp-name", variant, "--run-root", args.run_root, "--preset",
                 args.preset, "--total-timesteps", str(steps), *VARIANTS[variant].split(), *passed, "--resume"]
        resolved = module.resolve_args(common.parse_args(module.Args, flags))
        path = common.RunFolder(resolved).path
        refuse_other_flags(path, resolved)
        runs.append(Run(path.name, [sys.executable, str(ROOT / f"{module.SCRIPT}.py"), *flags], str(path),
                        resolved.total_timesteps, resolved.eval_episodes, count_updates(resolved)))
    return runs


def refuse_other_flags(path, args):
    """Before anything starts: a folder of this name holds a run with these flags. A run that is not begun or damaged
    is left to the script."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        common.refuse_other_args(path, json.loads((path / "args.json").read_text()), args)


def count_updates(args):
    if hasattr(args, "updates_per_step"):
        return max(0, args.total_timesteps - args.min_replay) // args.replay_period * args.updates_per_step
    return max(0, -(-args.total_timesteps // args.action_repeat) - args.init_steps)


# ------------------------------------------------------------------------------------------------- the live table
def table(runs):
    """One line a run that is not simply waiting or done, and a line of counts."""
    lines = []
    for run in runs:
        if run.state in ("running", "failed"):
            step, score, _ = run.progress()
            rate = (step - run.first_step) / max(1e-9, time.time() - run.began)
            left = f"ETA {(run.total - step) / rate / 3600:.1f} h" if run.state == "running" and rate > 0 else ""
            lines.append(f"{run.state:8} {run.name:45} step {step:>7,}/{run.total:,}  "
                         f"return {'-' if score is None else f'{score:.1f}':>8}  {left}")
    states = [run.state for run in runs]
    lines.append("  ".join(f"{states.count(state)} {state}" for state in ("queued", "running", "done", "failed")))
    return lines


class LiveTable:
    """Redrawn in place on a terminal; elsewhere printed when a run changes its state, and every minute."""

    def __init__(self):
        self.drawn, self.states, self.time = 0, None, 0.0

    def show(self, runs):
        states = [run.state for run in runs]
        live = sys.stdout.isatty()
        if states == self.states and time.time() - self.time < (1 if live else 60):
            return
        lines = table(runs)
        print((f"\033[{self.drawn}F\033[J" if live and self.drawn else "") + "\n".join(lines), flush=True)
        self.drawn, self.states, self.time = len(lines), states, time.time()


def finish(runs):
    """Say how failed runs ended, and give the exit code."""
    for run in runs:
        if run.state == "failed":
            log = run.log_file()
            tail = log.read_text(errors="replace").splitlines()[-8:] if log.is_file() else ["(no log)"]
            print(f"\n{run.name} failed; the end of {log}:\n  " + "\n  ".join(tail), file=sys.stderr)
    return 1 if any(run.state == "failed" for run in runs) else 0


# ------------------------------------------------------------------------------------------------- local
def start(run, environment):
    """Start a run's process, its output appended to its log."""
    run.log_file().parent.mkdir(parents=True, exist_ok=True)
    run.state, run.began, run.first_step = "running", time.time(), run.progress()[0]
    with open(run.log_file(), "a") as log:
        return subprocess.Popen(run.command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def run_locally(runs, args):
    import torch

    gpus, threads = torch.cuda.device_count(), args.threads or max(1, (os.cpu_count() or 1) // args.workers)
    waiting, active, stopped, live = [run for run in runs if run.state == "queued"], {}, [], LiveTable()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stopped.append(number))
    while active or (waiting and not stopped):
        for worker in range(args.workers):
            if worker not in active and waiting and not stopped:
                environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
                if gpus and "CUDA_VISIBLE_DEVICES" not in os.environ:
                    environment["CUDA_VISIBLE_DEVICES"] = str(worker % gpus)
                run = waiting.pop(0)
                active[worker] = run, start(run, environment)
        if stopped == [signal.SIGINT] or stopped == [signal.SIGTERM]:
            stopped.append(None)  # once: every run checkpoints and leaves
            for _, process in active.values():
                process.send_signal(signal.SIGTERM)
        for worker, (run, process) in list(active.items()):
            if process.poll() is not None:
                code = process.returncode
                run.state = "done" if code == 0 else "queued" if stopped and code >= 128 else "failed"
                del active[worker]
        live.show(runs)
        time.sleep(0.2)
    return 128 + stopped[0] if stopped else finish(runs)


# ------------------------------------------------------------------------------------------------- Slurm
class SlurmRun:
    """What a Slurm task does. Before the time limit, and when a job is preempted, Slurm sends SIGUSR2 and submitit
    calls `checkpoint`: the script gets the signal too, saves and leaves, and the job goes back to the queue."""

    def __call__(self, run):
        self.process = start(run, {**os.environ, "OMP_NUM_THREADS": os.environ.get("SLURM_CPUS_PER_TASK", "1")})
        code = self.end()
        if code != 0:
            raise RuntimeError(f"{run.name} ended with exit code {code}; see {run.log_file()}")

    def end(self):
        """Exit code of the script. Popen.wait would hold a lock that the signal handler below needs."""
        while self.process.poll() is None:
            time.sleep(0.2)
        return self.process.returncode

    def checkpoint(self, run):
        import submitit

        self.process.send_signal(signal.SIGUSR2)
        self.end()
        return submitit.helpers.DelayedSubmission(SlurmRun(), run)


def run_on_slurm(runs, args):
    import submitit

    waiting = [run for run in runs if run.state == "queued"]
    if not waiting:
        return finish(runs)
    executor = submitit.SlurmExecutor(folder=Path(args.run_root) / "logs" / "slurm", max_num_timeout=1000)
    gres = f"gpu:{args.gpu_type}:{args.gpus}" if args.gpu_type else f"gpu:{args.gpus}"
    extra = {"account": args.account} if args.account else {}
    executor.update_parameters(
        job_name=f"mooss_{args.suite}", partition=args.partition, time=max(1, round(60 * args.time_hours)),
        mem=f"{args.memory_gb}GB", cpus_per_task=args.threads or 8, gres=gres if args.gpus else None,
        signal_delay_s=args.signal_seconds, array_parallelism=args.parallelism, additional_parameters=extra)
    jobs = executor.map_array(SlurmRun(), waiting)
    array = jobs[0].job_id.split("_")[0]
    print(f"submitted {len(jobs)} runs as Slurm array {array}")
    live = LiveTable()
    while args.wait and any(run.state in ("queued", "running") for run in waiting):
        listed = subprocess.run(["squeue", "--noheader", "--array", "--format=%i %T", "--jobs", array],
                                capture_output=True, text=True)
        states = dict(line.split() for line in listed.stdout.splitlines())
        answered = listed.returncode == 0 or "Invalid job id" in listed.stderr
        for run, job in zip(waiting, jobs):
            run.missing = run.missing + 1 if answered and job.job_id not in states else 0
            if run.missing and run.state in ("queued", "running") and run.progress()[2]:
                run.state = "done"
            elif run.missing > 10 and run.state in ("queued", "running"):  # requeueing takes a moment
                run.state = "failed"
            elif run.state == "queued" and states.get(job.job_id) == "RUNNING":
                run.state, run.began, run.first_step = "running", time.time(), run.progress()[0]
            elif run.state == "running" and states.get(job.job_id) == "PENDING":
                run.state = "queued"  # it gave way and waits for its next turn
        live.show(runs)
        time.sleep(2)
    return finish(runs)


# ------------------------------------------------------------------------------------------------- main
def main(argv=None):
    args, passed = tyro.cli(SweepArgs, args=argv, return_unknown_args=True)
    runs = build_runs(args, passed)
    if args.dry_run:
        for run in runs:
            print(shlex.join(["python", *run.command[1:]]))
        updates, seconds = sum(run.updates for run in runs), args.seconds_per_update
        if seconds is None and SUITES[args.suite][0] == "dmc" and args.preset != "laptop":
            seconds = 1.5
        print(f"# {len(runs)} runs, {updates:,} updates, " + (
            f"{updates * seconds / 3600:,.0f} hours at {seconds} s an update" if seconds else
            "hours with --seconds-per-update (benchmark/speed.py measures it)"))
        return 0
    for run in runs:
        if run.progress()[2]:
            run.state = "done"
    print(f"{args.suite}: {len(runs)} runs, {sum(run.state == 'done' for run in runs)} of them finished already")
    return run_locally(runs, args) if args.cluster == "local" else run_on_slurm(runs, args)


if __name__ == "__main__":
    common.exit_with(main)
