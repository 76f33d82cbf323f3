"""Faults injected into running processes.

Whatever happens, a resumed run ends as if nothing had happened.
"""

import os
import pickle
import random
import resource
import signal
import time
from pathlib import Path

import pytest
import torch

import mooss_common as common
import rainbow_mooss_atari as atari
import sac_mooss_dmc as dmc
from helpers.runs import assert_same_run, damage
from helpers.tiny_run import SCRIPTS, Runner, small_disk

KILL = signal.SIGKILL
BOTH = pytest.mark.parametrize("script", ["dmc", "atari"])

# Moments of the tiny runs, counted in steps of all environments. Evaluations take 30 and 66 steps
# and come after 0, 20, 40 and 60 agent steps on DMC, after 0, 30, 60 and 70 on Atari.
LEARNING = {"dmc": 137, "atari": 175}
FIRST_EVALUATION = {"dmc": 5, "atari": 5}
LATER_EVALUATION = {"dmc": 115, "atari": 220}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that was never stopped, one of each script."""
    folders = {}
    for script in ("dmc", "atari"):
        runner = Runner(script, tmp_path_factory.mktemp(script))
        assert runner.run() == 0, runner.said()
        folders[script] = runner.folder
    return folders


def finish(runner, whole):
    assert runner.run() == 0, runner.said()
    assert "Traceback" not in runner.said()
    assert_same_run(whole[runner.script], runner.folder)


# -------------------------------------------------------------------------------------------- kill
@BOTH
@pytest.mark.parametrize("where,most", [("step", 100), ("half", 6), ("replace", 12), ("fsync", 12)])
def test_kill_9_at_random_moments_loses_nothing(script, where, most, tmp_path, whole):
    """Steps; half-written files; between two files; before anything reaches the disk.

    One run is killed again and again, then finished.
    """
    dice = random.Random(f"{script} {where}")
    runner = Runner(script, tmp_path)
    killed = 0
    for number in (1, dice.randint(2, most), dice.randint(2, most)):
        killed += runner.run((where, number, KILL)) == -KILL
    assert killed >= 1
    finish(runner, whole)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize(
    "where,count", [("step", 400), ("half", 20), ("replace", 60), ("fsync", 120)])
def test_kill_9_at_each_moment_loses_nothing(script, where, count, tmp_path, whole):
    """A run for each: every fifth step, and every write, rename and sync of the checkpoints."""
    for number in range(1, count + 1, 5 if where == "step" else 1):
        runner = Runner(script, tmp_path / str(number))
        if runner.run((where, number, KILL)) == 0:  # the run has fewer such calls
            break
        finish(runner, whole)
    assert number > 8


@BOTH
def test_kill_9_by_the_clock_loses_nothing(script, tmp_path, whole):
    dice = random.Random(script)
    runner = Runner(script, tmp_path)
    codes = []
    for _ in range(4):
        process = runner.start(step_seconds=0.01)
        time.sleep(dice.uniform(0.1, 1.5))
        process.kill()
        process.join()
        codes.append(process.exitcode)
    assert -KILL in codes
    finish(runner, whole)


@pytest.mark.parametrize("script,moment", [("reacher", 1300), ("breakout", 280)])
def test_a_real_simulator_resumes_exactly(script, moment, tmp_path):
    """Reacher keeps its target in its model, Breakout is in the middle of a game."""
    whole = Runner(script, tmp_path / "whole")
    runner = Runner(script, tmp_path / "killed")
    assert whole.run() == 0, whole.said()
    assert runner.run(("step", moment, KILL)) == -KILL, runner.said()
    finish(runner, {script: whole.folder})
    assert "resuming" in runner.said()


# ----------------------------------------------------------------------------------------- signals
@BOTH
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_a_signal_checkpoints_and_leaves_with_its_code(script, name, tmp_path, whole):
    number = signal.Signals[name]
    runner = Runner(script, tmp_path)
    assert runner.run(("step", LEARNING[script], number)) == 128 + number, runner.said()
    state = torch.load(runner.folder / "checkpoint.pt", weights_only=True)
    # It is not an old one: what is left to do starts at the next step.
    assert state["step"] % SCRIPTS[script][2]["checkpoint_every"] != 0
    assert runner.steps() == LEARNING[script]
    finish(runner, whole)


def test_a_closed_terminal_leaves_with_129(tmp_path):
    """The number that shells and schedulers see, written out."""
    runner = Runner("dmc", tmp_path)
    assert runner.run(("step", LEARNING["dmc"], signal.SIGHUP)) == 129, runner.said()


@BOTH
def test_a_closed_terminal_does_not_stop_a_run_under_nohup(script, tmp_path, whole):
    runner = Runner(script, tmp_path)
    assert runner.run(("step under nohup", LEARNING[script], signal.SIGHUP)) == 0, runner.said()
    assert runner.steps() > LEARNING[script]
    assert_same_run(whole[script], runner.folder)


@BOTH
@pytest.mark.parametrize("moment", [FIRST_EVALUATION, LATER_EVALUATION], ids=["first", "later"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_stops_an_evaluation_at_its_next_step(script, moment, name, tmp_path, whole):
    """The unfinished evaluation leaves no rows, and a resumed run repeats it.

    On Atari the other game of the evaluation may still take the step that all games take together.
    """
    number = signal.Signals[name]
    runner = Runner(script, tmp_path)
    assert runner.run(("step", moment[script], number)) == 128 + number, runner.said()
    others = SCRIPTS[script][2]["eval_episodes"] - 1 if script == "atari" else 0
    assert moment[script] <= runner.steps() <= moment[script] + others
    state = torch.load(runner.folder / "checkpoint.pt", weights_only=True)
    assert state["step"] % SCRIPTS[script][2]["eval_every"] == 0  # it was in an evaluation
    evaluations = (runner.folder / "eval.csv").read_text().splitlines()[1:]
    assert all(int(row.split(",")[0]) < state["step"] for row in evaluations)
    finish(runner, whole)


@pytest.mark.slow
@BOTH
def test_a_signal_in_an_evaluation_leaves_within_a_second(script, tmp_path, whole):
    """Of this evaluation, 5 or more seconds are left when the signal comes."""
    runner = Runner(script, tmp_path)
    process = runner.start(step_seconds=0.2)
    runner.wait_until(lambda: runner.steps() >= FIRST_EVALUATION[script])
    began = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    seconds = time.monotonic() - began
    assert process.exitcode == 128 + signal.SIGTERM, runner.said()
    assert seconds < 1
    finish(runner, whole)


# -------------------------------------------------------------------------------------------- disk
@BOTH
@pytest.mark.parametrize("size", [300, 20_000])
def test_a_file_that_cannot_grow_is_one_sentence(script, size, tmp_path, whole):
    """A limit on file sizes meets checkpoints, logs and TensorBoard; each stop is exit 2."""
    runner = Runner(script, tmp_path)
    assert runner.run(("size", size, 0)) == 2
    sentence = runner.said().strip().splitlines()[-1]
    assert sentence.startswith("error: "), runner.said()
    assert "Traceback" not in runner.said(), runner.said()
    finish(runner, whole)


@BOTH
def test_a_full_disk_is_one_sentence_and_loses_nothing(script, tmp_path, whole):
    """A small tmpfs that is full already, or fills while the run logs and checkpoints."""
    with small_disk(tmp_path / "disk", 2_000_000) as disk:
        if disk is None:
            pytest.skip("mounting a tmpfs is not allowed here")
        runner = Runner(script, disk / "runs", notes=tmp_path)
        ballast = disk / "ballast"
        stopped = 0
        for free in (0, 30_000, 100_000, 300_000):
            ballast.unlink(missing_ok=True)
            left = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
            ballast.write_bytes(bytes(max(0, left - free)))
            stopped += runner.run() == 2
            assert "Traceback" not in runner.said(), runner.said()
        assert stopped >= 2
        ballast.unlink()
        finish(runner, whole)


# ------------------------------------------------------------------------------------------- files
@BOTH
@pytest.mark.parametrize("kind", ["truncated", "empty", "flipped"])
def test_damage_falls_back_or_says_that_nothing_is_whole(script, kind, tmp_path, whole):
    runner = Runner(script, tmp_path)
    assert runner.run(("step", LEARNING[script], signal.SIGTERM)) == 128 + signal.SIGTERM
    damage(runner.folder / "checkpoint.pt", kind)
    finish(runner, whole)
    assert "skipping a checkpoint" in runner.said()
    for name in common.CHECKPOINT_NAMES:
        damage(runner.folder / name, kind)
    assert runner.run() == 2
    assert "no checkpoint in" in runner.said().splitlines()[-1]


@BOTH
def test_a_damaged_piece_of_the_replay_is_noticed(script, tmp_path):
    runner = Runner(script, tmp_path)
    assert runner.run(("step", LEARNING[script], signal.SIGTERM)) == 128 + signal.SIGTERM
    pieces = list((runner.folder / "replay").iterdir())
    assert pieces
    for piece in pieces:
        damage(piece, "flipped")
    assert runner.run() == 2
    assert "no checkpoint in" in runner.said().splitlines()[-1]


class Malicious:
    """Makes a folder as soon as somebody unpickles it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@BOTH
@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_a_malicious_checkpoint_is_never_executed(script, how, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = SCRIPTS[script][0]
    bad = tmp_path / "bad.pt"
    trap = tmp_path / "trap"
    if how == "torch":
        common.write_atomically(bad, {
            "format": common.CHECKPOINT_FORMAT,
            "script": Path(module.__file__).stem,
            "agent": Malicious(str(trap)),
        })
    else:
        bad.write_bytes(pickle.dumps(Malicious(str(trap))))

    with pytest.raises(SystemExit) as exit_:
        words = ["--eval-only", "--checkpoint", str(bad)]
        common.exit_with(
            lambda: module.main(common.parse_args(module.Args, module.fill_presets, words)))
    assert exit_.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1

    runner = Runner(script, tmp_path / "runs")
    assert runner.run(("step", LEARNING[script], signal.SIGTERM)) == 128 + signal.SIGTERM
    for name in common.CHECKPOINT_NAMES:
        (runner.folder / name).write_bytes(bad.read_bytes())
    assert runner.run() == 2
    assert not trap.exists()
    # The trap does work: who unpickles it gets a folder.
    if how == "torch":
        torch.load(bad, weights_only=False)
    else:
        pickle.loads(bad.read_bytes())
    assert trap.exists()


BAD_NAMES = ["../out", "/out", "..", "", "a\0b", "x" * 300]


@pytest.mark.parametrize("module", [dmc, atari], ids=["dmc", "atari"])
@pytest.mark.parametrize("flags", [
    *[{"exp_name": name} for name in (*BAD_NAMES, "a/b")],
    *[{"env_id": name} for name in (*BAD_NAMES, "a/../b", "a//b")],
], ids=str)
def test_a_name_that_could_leave_the_run_folder_is_refused(module, flags):
    with pytest.raises(common.UsageError, match="cannot be part of a folder's name"):
        module.resolve_args(module.Args(**flags))


@pytest.mark.parametrize("module", [dmc, atari], ids=["dmc", "atari"])
def test_a_run_root_that_the_locale_cannot_write_is_refused(module):
    """Under LC_ALL=C Python reads the letters of other alphabets as lone surrogates."""
    misread = "runs/ü".encode().decode("ascii", "surrogateescape")
    with pytest.raises(common.UsageError, match="--run-root .* locale"):
        module.resolve_args(module.Args(run_root=misread))
    module.resolve_args(module.Args(run_root="runs/ü"))


@pytest.mark.parametrize("module", [dmc, atari], ids=["dmc", "atari"])
def test_an_environment_of_a_namespace_has_its_folder_below_the_run_root(module, tmp_path):
    """As in `lab/Dot-v0`: a slash in the id is none in the folder's name."""
    args = module.resolve_args(module.Args(env_id="lab/Dot-v0", run_root=str(tmp_path)))
    assert common.RunFolder(args, module.__file__).path.parent == tmp_path


# ----------------------------------------------------------------------------------- two processes
@BOTH
def test_a_second_process_is_refused_and_a_dead_one_does_not_block(script, tmp_path, whole):
    runner = Runner(script, tmp_path)
    first = runner.start(step_seconds=0.1)
    runner.wait_until(lambda: (runner.folder / "args.json").exists())
    assert runner.run() == 2
    assert "another process is running in" in runner.said()
    first.kill()
    first.join()
    assert first.exitcode == -KILL
    finish(runner, whole)


# -------------------------------------------------------------------------------------------- soak
def memory_and_files(process):
    """Resident memory (MB) and number of open files of a process, or None if it has ended."""
    try:
        pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
        files = len(os.listdir(f"/proc/{process.pid}/fd"))
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return None
    return pages * resource.getpagesize() / 1e6, files


def soak(script, updates, tmp_path):
    """Memory and open files of one long run, sampled as it goes; printed, and flat at the end."""
    runner = Runner(script, tmp_path)
    # After the random steps an update for every two env steps on DMC, two for each step on Atari.
    total = {"dmc": 2 * updates + 40, "atari": updates // 2 + 30}[script]
    process = runner.start(
        total_timesteps=total, eval_every=total // 20, checkpoint_every=total // 40)
    samples = []
    while process.is_alive():
        samples.append(memory_and_files(process))
        time.sleep(0.05)
    process.join()
    assert process.exitcode == 0, runner.said()
    state = torch.load(runner.folder / "checkpoint.pt", weights_only=True)
    assert state["counters"]["update"] >= updates - 2

    samples = [sample for sample in samples if sample is not None]
    quarter = len(samples) // 4
    memory_before, files_before = map(max, zip(*samples[quarter:2 * quarter]))
    memory_after, files_after = map(max, zip(*samples[3 * quarter:]))
    print(f"{script}: {updates} updates; memory {memory_before:.1f} -> {memory_after:.1f} MB, "
          f"open files {files_before} -> {files_after}")
    assert memory_after <= memory_before + 8
    # A sample may meet a file that is open for a moment; a leak would grow with every row.
    assert files_after <= files_before + 2


@BOTH
def test_memory_and_files_stay_flat(script, tmp_path):
    soak(script, 400, tmp_path)


@pytest.mark.slow
@BOTH
def test_memory_and_files_stay_flat_over_20000_updates(script, tmp_path):
    soak(script, 20_000, tmp_path)
