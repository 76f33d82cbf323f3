"""Sweeps: exact lists of runs, and real runs that fail, are killed, stopped and resumed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import mooss_common as common
import rainbow_mooss_atari as atari
import sac_mooss_dmc as dmc
from helpers.terminal import Terminal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmark"))
import report
import sweep

TINY_RUN = (
    "--total-timesteps 60 --min-replay 40 --batch-size 2 --channels 4 4 4 --hidden-units 8 "
    "--eval-episodes 2 --max-frames 400 --buffer-size 200 --device cpu --checkpoint-every 20"
).split()
GAMES = (
    "Alien Amidar Assault Asterix BankHeist BattleZone Boxing Breakout ChopperCommand "
    "CrazyClimber DemonAttack Freeway Frostbite Gopher Hero Jamesbond Kangaroo Krull KungFuMaster "
    "MsPacman Pong PrivateEye Qbert RoadRunner Seaquest UpNDown").split()
DMC = [
    "finger-spin", "cartpole-swingup", "reacher-easy", "cheetah-run", "walker-walk",
    "ball_in_cup-catch"]
BOTH = ["--aux-weight 0", ""]
COMPONENTS = [
    "--aux-weight 0", "--temporal-window 0 --mask-ratio 0", "--temporal-window 6 --mask-ratio 0",
    "--mask-type cube", ""]
EXPECTED = {  # tasks, flags that tell the variants apart, steps
    "dmc100k": (DMC, BOTH, 100_000),
    "dmc500k": (DMC, BOTH, 500_000),
    "dmc_hard": (["reacher-hard", "walker-run"], BOTH, 500_000),
    "atari100k": (GAMES, BOTH, 100_000),
    "ablation_components": (DMC, COMPONENTS, 100_000),
    "ablation_decoder": (
        DMC, ["", *(f"--decoder-inputs {inputs}" for inputs in ("none", "s", "sar"))], 100_000),
    "ablation_depth": (DMC, ["", *(f"--decoder-depth {n}" for n in (1, 3, 4))], 100_000),
    "ablation_window": (DMC, ["", *(f"--temporal-window {n}" for n in (0, 2, 4, 8))], 100_000),
    "ablation_mask_ratio": (
        DMC, ["", *(f"--mask-ratio {p}" for p in (0.1, 0.3, 0.7, 0.9))], 100_000),
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A sweep's default folder is `runs` where it is called: never the one that the user has."""
    monkeypatch.chdir(tmp_path)


# ---------------------------------------------------------------------------------- lists of runs
@pytest.mark.parametrize("suite", sweep.SUITES)
def test_dry_run_lists_exactly_the_runs_of_the_table(suite, capsys):
    assert sweep.main([suite, "--dry-run", "--seeds", "1", "2", "--seconds-per-update", "2"]) == 0
    *commands, summary = capsys.readouterr().out.splitlines()
    tasks, variants, steps = EXPECTED[suite]
    found = []
    names = set()
    for command in commands:
        pattern = (r"python \S+\.py --env-id (\S+) --seed (\d) --exp-name (\S+) --run-root runs "
                   r"--preset paper --total-timesteps (\d+) ?(.*?) ?--resume")
        task, seed, name, total, flags = re.fullmatch(pattern, command).groups()
        found.append((task, int(seed), int(total), flags))
        names.add((task, seed, name))
    assert sorted(found) == sorted(
        (task, seed, steps, flags) for task in tasks for seed in (1, 2) for flags in variants)
    assert len(names) == len(commands)
    updates = int(re.search(r"([\d,]+) updates", summary)[1].replace(",", ""))
    if suite == "dmc100k":
        per_task = [50_000, 12_500, 25_000, 25_000, 50_000, 25_000]
        assert updates == 2 * 2 * (sum(per_task) - 6 * 1000)
    if suite == "atari100k":
        assert updates == 26 * 2 * 2 * 98_000 * 2
    assert f"{updates * 2 / 3600:,.0f} hours at 2.0 s" in summary


def test_flags_pass_through_and_bad_ones_are_refused(capsys):
    sweep.main("dmc100k --dry-run --only reacher-easy --seeds 7 --num-filters 8 "
               "--share-mask".split())
    commands = capsys.readouterr().out.splitlines()[:-1]
    assert len(commands) == 2
    assert all("--num-filters 8 --share-mask" in command for command in commands)
    with pytest.raises(common.UsageError, match="reacher-easy"):
        sweep.main(["dmc100k", "--dry-run", "--only", "reacher-eazy"])
    with pytest.raises(common.UsageError, match="--cube-size"):
        sweep.main(["dmc100k", "--dry-run", "--cube-size", "5"])


@pytest.mark.parametrize("words", [
    "--workers 0", "--workers -1", "--threads -1", "--parallelism 0", "--time-hours nan",
    "--variants moos"])
def test_numbers_that_make_no_sense_are_refused_in_one_sentence(words, capsys):
    with pytest.raises(SystemExit) as ended:
        common.exit_with(lambda: sweep.main(["dmc100k", *words.split()]))
    out, error = capsys.readouterr()
    assert ended.value.code == 2 and out == ""
    assert error.startswith(f"error: {words.split()[0]} ") and error.count("\n") == 1


def test_a_sweep_refuses_a_folder_with_other_flags(tmp_path):
    """Also one that is finished; but a longer DMC run holds the shorter one."""
    def sweep_of(suite, task, *words):
        return sweep.main([suite, "--only", task, "--variants", "base", "--seeds", "1",
                           "--run-root", str(tmp_path), "--dry-run", *words])

    for module, task, steps in ((dmc, "reacher-easy", 500_000), (atari, "Pong", 100_000)):
        args = module.resolve_args(module.fill_presets(module.Args(
            env_id=task, exp_name="base", aux_weight=0.0, run_root=str(tmp_path),
            total_timesteps=steps)))
        folder = common.RunFolder(args, module.__file__)
        folder.path.mkdir()
        (folder.path / "args.json").write_text(json.dumps(folder.described()))
    assert sweep_of("dmc100k", "reacher-easy") == sweep_of("atari100k", "Pong") == 0
    with pytest.raises(common.UsageError, match="render_size was 100, is 50"):
        sweep_of("dmc100k", "reacher-easy", "--preset", "laptop")
    with pytest.raises(common.UsageError, match="total_timesteps was 100000, is 50000"):
        sweep_of("atari100k", "Pong", "--total-timesteps", "50000")


def test_damaged_logs_count_as_no_progress(tmp_path):
    """The script that resumes the run judges them; the sweep only looks."""
    run = sweep.Run("x", [], str(tmp_path), total=100, eval_episodes=1, updates=0)
    (tmp_path / "eval.csv").write_text("step,return,length\r\n100,7,5\r\n")
    assert run.progress() == (100, 7.0, True)
    for garbage in (b"\xff\0,\n\0", b"step,return,length\r\nten,much,5\r\n", b"x" * 200_000):
        (tmp_path / "eval.csv").write_bytes(garbage)
        assert run.progress() == (0, None, False)


# --------------------------------------------------------------------------------------- real runs
def start_sweep(run_root, *words, **environment):
    command = [sys.executable, str(ROOT / "benchmark" / "sweep.py"), "atari100k",
               "--only", "Breakout", "--run-root", str(run_root), *TINY_RUN, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, **environment})


def finish(process, seconds=300):
    out, error = process.communicate(timeout=seconds)
    return process.returncode, out, error


def rows_in(file):
    return len(file.read_text().splitlines()) - 1 if file.exists() else 0


def wait_for(condition, seconds=90):
    until = time.time() + seconds
    while not condition():
        assert time.time() < until, "waited too long"
        time.sleep(0.05)


def test_a_local_sweep_of_real_runs_ends_in_a_report(tmp_path, capsys):
    """The command that it prints at its end makes the report."""
    words = ("--seeds", "1", "--workers", "2", "--threads", "1")
    code, out, error = finish(start_sweep("runs", *words))
    assert code == 0, error
    *_, counts, last = out.splitlines()
    assert "2 done  0 failed" in counts
    again, out, _ = finish(start_sweep("runs", "--seeds", "1"))
    assert again == 0 and "2 of them finished already" in out and out.splitlines()[-1] == last
    assert report.main(re.search(r"report\.py (.*)", last)[1].split()) == 0
    text = (tmp_path / "report" / "report.md").read_text()
    assert "Atari, 60 interactions" in text
    assert re.search(r"\| Breakout \| -?[\d.]+ \(1 x 2\) \| -?[\d.]+ \(1 x 2\) \|", text)


def test_a_killed_run_is_reported_and_resumed_by_the_same_command(tmp_path):
    words = "--seeds 1 --variants mooss --total-timesteps 200".split()
    process = start_sweep(tmp_path, *words)
    folder = tmp_path / "Breakout__mooss__s1"
    wait_for((folder / "checkpoint.pt").exists)
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(children[0]), signal.SIGKILL)
    code, out, error = finish(process)
    assert code == 1 and "1 failed" in out
    assert "Breakout__mooss__s1 failed; the end of" in error
    code, out, error = finish(start_sweep(tmp_path, *words))
    assert code == 0 and "1 done" in out, error
    assert "resuming" in (tmp_path / "logs" / "Breakout__mooss__s1.log").read_text()


def test_a_failing_run_is_reported_and_does_not_stop_the_others(tmp_path):
    (tmp_path / "Breakout__base__s1").mkdir()
    (tmp_path / "Breakout__base__s1" / "notes.txt").write_text("not a run")
    code, out, error = finish(start_sweep(tmp_path, "--seeds", "1"))
    assert code == 1 and "1 done  1 failed" in out
    assert "Breakout__base__s1 failed" in error and "holds no run of ours" in error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopping_a_sweep_checkpoints_its_runs(number, tmp_path):
    """The runs checkpoint only when told to."""
    words = ("--seeds 1 --variants mooss --total-timesteps 5000 --checkpoint-every 0 "
             "--log-every 5").split()
    process = start_sweep(tmp_path, *words)
    folder = tmp_path / "Breakout__mooss__s1"
    wait_for(lambda: rows_in(folder / "train.csv") > 1)
    assert not (folder / "checkpoint.pt").exists()
    process.send_signal(number)
    code, out, _ = finish(process)
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert code == 128 + number and 40 <= state["step"] < 5000
    assert out.splitlines()[-1] == "stopped: repeat the same command to go on"


def test_the_live_table_fits_a_terminal_of_80_columns(tmp_path, monkeypatch):
    """What is drawn again and again would leave its traces there; what stays may wrap."""
    terminal = Terminal(columns=80)
    monkeypatch.setattr(sys, "stdout", terminal.output)
    runs = []
    for seed in range(4):
        name = f"ball_in_cup-catch__{'a_long_variant_' * 4}__s{seed}"
        runs.append(sweep.Run(name, [], str(tmp_path / name), 100_000, 1, 0, "running"))
        (tmp_path / name).mkdir()
        (tmp_path / name / "eval.csv").write_text("step,return,length\n50000,123.4,5\n")
    live = sweep.LiveTable()
    live.show(runs)
    for run in runs:
        run.state = "done"
    live.show(runs)
    live.close(runs)
    drawn = terminal.text()
    assert drawn.count("ball_in_cup-catch__a_long_variant") >= 4
    assert "4 running" in drawn and "return 123.4" in drawn
    assert drawn.endswith("0 queued  0 running  4 done  0 failed\n")
    lines = [re.sub(r"\x1b\[[A-Z]", "", line) for line in re.split(r"[\r\n]", drawn)]
    staying = [line for line in lines if line.startswith("done ")]
    assert len(staying) == 4
    assert [line for line in lines if len(line) > 80 and line not in staying] == []


# ------------------------------------------------------------------------------------------- Slurm
@pytest.fixture
def slurm(tmp_path):
    if shutil.which("slurmctld") is None or os.geteuid() != 0:
        pytest.skip("needs root and Debian's slurm-wlm and munge")
    state = tmp_path / "slurm"
    script = str(ROOT / "tests" / "local_slurm.sh")
    started = subprocess.run(["bash", script, "start", str(state)], capture_output=True, text=True)
    assert started.returncode == 0, started.stderr
    yield {"SLURM_CONF": str(state / "slurm.conf")}
    environment = {**os.environ, "SLURM_CONF": str(state / "slurm.conf")}
    subprocess.run(["scancel", "--user", "root"], env=environment)
    time.sleep(1)
    subprocess.run(["bash", script, "stop", str(state)])


def test_slurm_array_survives_the_time_limit_signal(tmp_path, slurm):
    """Two runs as an array on a real cluster; one gets the signal, requeues itself and finishes."""
    environment = {**os.environ, **slurm}

    def ask(*command):
        return subprocess.run(command, env=environment, capture_output=True, text=True).stdout

    words = ("--seeds 1 2 --variants mooss --cluster slurm --gpus 0 --threads 1 --memory-gb 2 "
             "--time-hours 0.5 --total-timesteps 300 --log-every 5 --checkpoint-every 0").split()
    process = start_sweep(tmp_path / "runs", *words, **slurm)
    folder = tmp_path / "runs" / "Breakout__mooss__s1"
    wait_for(lambda: rows_in(folder / "train.csv") > 0)
    job = min(ask("squeue", "--noheader", "--array", "--format=%i").split())
    ask("scancel", "--signal=USR2", job)
    wait_for(lambda: f"{job} PENDING" in ask("squeue", "--noheader", "--array", "--format=%i %T"))
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)["step"]
    assert 40 <= saved < 300
    # Slurm lets a requeued job wait for two minutes; within its first seconds the old credential
    # still counts.
    ask("scontrol", "update", f"JobId={job}", "StartTime=now+5")
    code, out, error = finish(process)
    assert code == 0, error
    assert "2 done" in out and "submitted 2 runs as Slurm array" in out
    log = tmp_path / "runs" / "logs" / "Breakout__mooss__s1.log"
    assert f"at step {saved}" in log.read_text()
