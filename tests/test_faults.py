"""Faults injected into running processes: whatever happens, a resumed run ends as if nothing had happened."""

import os
import pickle
import random
import resource
import signal
import time

import pytest
import torch

import mooss_common as common
import rainbow_mooss_atari as atari
import sac_mooss_dmc as dmc
from test_run import assert_same_run, damage
from tiny_run import SCRIPTS, Runner, small_disk

KILL = signal.SIGKILL
BOTH = pytest.mark.parametrize("script", ["dmc", "atari"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that was never stopped, one of each script."""
    runners = {script: Runner(script, tmp_path_factory.mktemp(script)) for script in ("dmc", "atari")}
    for runner in runners.values():
        assert runner.run() == 0, runner.said()
    return {script: runner.folder for script, runner in runners.items()}


def finish(runner, whole):
    assert runner.run() == 0, runner.said()
    assert "Traceback" not in runner.said()
    assert_same_run(whole[runner.script], runner.folder)


# ---------------------------------------------------------------------------------------------- kill -9
def killed_at(where, numbers, script, tmp_path, whole):
    """One run, killed again and again at the given calls, then finished."""
    runner, killed = Runner(script, tmp_path), 0
    for number in numbers:
        killed += runner.run((where, number, KILL)) == -KILL
    assert killed >= 1
    finish(runner, whole)


@BOTH
@pytest.mark.parametrize("where,most", [("step", 100), ("half", 6), ("replace", 12), ("fsync", 12)])
def test_kill_9_at_random_moments_loses_nothing(script, where, most, tmp_path, whole):
    """Steps of training and of evaluation; half-written files; between files; before anything reaches the disk."""
    dice = random.Random(f"{script} {where}")
    killed_at(where, [1, *(dice.randint(2, most) for _ in range(2))], script, tmp_path, whole)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("where,count", [("step", 400), ("half", 20), ("replace", 60), ("fsync", 120)])
def test_kill_9_at_each_moment_loses_nothing(script, where, count, tmp_path, whole):
    """A run for each: every fifth environment step, and every write, rename and sync of the checkpoints."""
    for number in range(1, count + 1, 5 if where == "step" else 1):
        runner = Runner(script, tmp_path / str(number))
        if runner.run((where, number, KILL)) == 0:  # the run has fewer such calls
            break
        finish(runner, whole)
    assert number > 8


@BOTH
def test_kill_9_by_the_clock_loses_nothing(script, tmp_path, whole):
    dice, runner, codes = random.Random(script), Runner(script, tmp_path), []
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
    """Reacher keeps its target in its model, Breakout is in the middle of a game: both come back as they were."""
    whole, runner = Runner(script, tmp_path / "whole"), Runner(script, tmp_path / "killed")
    assert whole.run() == 0, whole.said()
    assert runner.run(("step", moment, KILL)) == -KILL, runner.said()
    finish(runner, {script: whole.folder})
    assert "resuming" in runner.said()


# ---------------------------------------------------------------------------------------------- signals
@BOTH
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_checkpoints_and_leaves_with_its_code(script, number, tmp_path, whole):
    """In training, and once in the evaluation that begins a run."""
    for moment in (5, 45) if number == signal.SIGTERM else (45,):
        runner = Runner(script, tmp_path / str(moment))
        assert runner.run(("step", moment, number)) == 128 + number
        assert (runner.folder / "checkpoint.pt").exists()
        finish(runner, whole)


# ---------------------------------------------------------------------------------------------- disk
@BOTH
def test_a_file_that_cannot_grow_is_one_sentence(script, tmp_path, whole):
    """A limit on file sizes meets checkpoints, logs and TensorBoard at different sizes; each stop is exit 2."""
    for number, size in enumerate((300, 20_000)):
        runner = Runner(script, tmp_path / str(number))
        assert runner.run(("size", size, 0)) == 2
        sentence = runner.said().strip().splitlines()[-1]
        assert sentence.startswith("error: ") and "Traceback" not in runner.said(), runner.said()
        finish(runner, whole)


@BOTH
def test_a_full_disk_is_one_sentence_and_loses_nothing(script, tmp_path, whole):
    """A small tmpfs that is full already, or fills while the run logs and checkpoints."""
    with small_disk(tmp_path / "disk", 2_000_000) as disk:
        if disk is None:
            pytest.skip("mounting a tmpfs is not allowed here")
        runner, ballast = Runner(script, disk / "runs"), disk / "ballast"
        runner.log = tmp_path / "log.txt"
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


# ---------------------------------------------------------------------------------------------- files
@BOTH
@pytest.mark.parametrize("kind", ["truncated", "empty", "flipped"])
def test_damage_anywhere_falls_back_or_says_that_nothing_is_whole(script, kind, tmp_path, whole):
    runner = Runner(script, tmp_path)
    assert runner.run(("step", 100, signal.SIGTERM)) == 128 + signal.SIGTERM
    damage(runner.folder / "checkpoint.pt", kind)
    finish(runner, whole)
    assert "skipping a checkpoint" in runner.said()
    for name in ("checkpoint.pt", "checkpoint_previous.pt"):
        damage(runner.folder / name, kind)
    assert runner.run() == 2 and "no checkpoint in" in runner.said().splitlines()[-1]


@BOTH
def test_a_damaged_piece_of_the_replay_is_noticed(script, tmp_path):
    runner = Runner(script, tmp_path)
    assert runner.run(("step", 100, signal.SIGTERM)) == 128 + signal.SIGTERM
    for piece in (runner.folder / "replay").iterdir():
        damage(piece, "flipped")
    assert runner.run() == 2 and "no checkpoint in" in runner.said().splitlines()[-1]


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@BOTH
@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_a_malicious_checkpoint_is_never_executed(script, how, tmp_path, capsys):
    module = SCRIPTS[script][0]
    runner, bad, trap = Runner(script, tmp_path), tmp_path / "bad.pt", str(tmp_path / "trap")
    if how == "torch":
        torch.save({"format": 1, "script": module.SCRIPT, "agent": Malicious(trap)}, bad)
    else:
        bad.write_bytes(pickle.dumps(Malicious(trap)))
    with pytest.raises(SystemExit) as exit_:
        common.run_cli(module.Args, module.main, ["--eval-only", "--checkpoint", str(bad)])
    assert exit_.value.code == 2 and capsys.readouterr().err.count("\n") == 1
    assert runner.run(("step", 100, signal.SIGTERM)) == 128 + signal.SIGTERM
    for name in ("checkpoint.pt", "checkpoint_previous.pt"):
        (runner.folder / name).write_bytes(bad.read_bytes())
    assert runner.run() == 2
    assert not os.path.exists(trap)
    with pytest.raises(FileExistsError):  # the trap does work
        os.mkdir(trap)
        torch.load(bad, weights_only=False) if how == "torch" else pickle.loads(bad.read_bytes())


@pytest.mark.parametrize("name", ["../out", "/out", "a/b", "..", "", "a\0b", "x" * 300])
@pytest.mark.parametrize("flag", ["exp_name", "env_id"])
def test_a_name_cannot_leave_the_run_folder(name, flag):
    for module in (dmc, atari):
        with pytest.raises(common.UsageError):
            module.resolve_args(module.Args(**{flag: name}))


# ---------------------------------------------------------------------------------------------- two processes
@BOTH
def test_a_second_process_is_refused_and_a_dead_one_does_not_block(script, tmp_path, whole):
    runner = Runner(script, tmp_path)
    first = runner.start(step_seconds=0.1)
    runner.wait_until(lambda: (runner.folder / "args.json").exists())
    assert runner.run() == 2 and "another process is running in" in runner.said()
    first.kill()
    first.join()
    finish(runner, whole)


# ---------------------------------------------------------------------------------------------- soak
def soak(script, updates, tmp_path):
    """Resident memory (MB) and open files of one long run, sampled while it goes; printed, and flat at the end."""
    runner, samples, total = Runner(script, tmp_path), [], {"dmc": 2 * updates + 40, "atari": updates // 2 + 30}
    process = runner.start(total_timesteps=total[script], eval_every=total[script] // 20,
                           checkpoint_every=total[script] // 40)
    while process.is_alive():
        try:
            pages = int(open(f"/proc/{process.pid}/statm").read().split()[1])
            samples.append((pages * resource.getpagesize() / 1e6, len(os.listdir(f"/proc/{process.pid}/fd"))))
        except (FileNotFoundError, ProcessLookupError, IndexError):
            break
        time.sleep(0.05)
    process.join()
    assert process.exitcode == 0, runner.said()
    state = torch.load(runner.folder / "checkpoint.pt", weights_only=True)
    assert state["update"] >= updates - 2
    quarter = len(samples) // 4
    second, last = samples[quarter:2 * quarter], samples[3 * quarter:]
    (memory_before, files_before), (memory_after, files_after) = (map(max, zip(*part)) for part in (second, last))
    print(f"{script}: {state['update']} updates; memory {memory_before:.1f} -> {memory_after:.1f} MB, "
          f"open files {files_before} -> {files_after}")
    assert memory_after <= memory_before + 8 and files_after <= files_before


@BOTH
def test_memory_and_files_stay_flat(script, tmp_path):
    soak(script, 400, tmp_path)


@pytest.mark.slow
@BOTH
def test_memory_and_files_stay_flat_over_20000_updates(script, tmp_path):
    soak(script, 20_000, tmp_path)
