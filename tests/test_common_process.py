"""What a process does around a run: seeds, signals at its edges, output that breaks, memory."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import mooss_common as common
import rainbow_mooss_atari as atari
import sac_mooss_dmc as dmc
from conftest import ROOT
from helpers.tiny_run import TESTS

BOTH = pytest.mark.parametrize("module", [dmc, atari], ids=["dmc", "atari"])


def python(code, **settings):
    """A program in a process of its own that finds the scripts and the helpers."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)])}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, **settings)


# -------------------------------------------------------------------------------------------- seeds
def test_random_streams_of_different_parts_never_share_a_seed():
    words = ("training", "evaluation")
    seeds = {common.derive_seed(a, word, b) for a in range(20) for b in range(20) for word in words}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert common.derive_seed(1, "masks", 2) == common.derive_seed(1, "masks", 2)


# ------------------------------------------------------------------------------------------ imports
@BOTH
def test_what_a_run_may_not_need_is_not_imported(module):
    """W&B only with --track, the simulators only with an environment."""
    slow = ["wandb", "dm_control", "ale_py", "tensorboard"]
    code = f"import sys, {module.__name__}; print([x for x in {slow} if x in sys.modules])"
    done = python(code)
    assert done.stdout == "[]\n", done.stderr


# ------------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize("error", [
    MemoryError(), RuntimeError("could not create a primitive"),
    RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")], ids=repr)
def test_too_little_memory_is_one_sentence(error, capsys):
    def greedy():
        raise error

    with pytest.raises(SystemExit) as ended:
        common.exit_with(greedy)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("error: out of memory") and said.count("\n") == 1


def test_torchs_own_words_for_too_little_memory_are_known(capsys):
    with pytest.raises(SystemExit) as ended:
        common.exit_with(lambda: torch.zeros(2**48))
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: out of memory")


def test_an_error_in_the_code_is_not_hidden():
    with pytest.raises(RuntimeError, match="shapes do not match"):
        common.exit_with(lambda: (_ for _ in ()).throw(RuntimeError("shapes do not match")))


# ------------------------------------------------------------------------------------------- output
PRINTS = """
import mooss_common as common
def main():
    for line in range(20000):
        print("return 3.0 ± 1.0")
    open("done", "w").close()
    return 7
common.exit_with(main)
"""


def test_a_letter_that_the_output_lacks_ends_no_run(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", PRINTS], capture_output=True, cwd=tmp_path, env=environment)
    assert done.returncode == 7, done.stderr
    assert done.stdout.count(b"return 3.0 ? 1.0\n") == 20_000


@pytest.mark.parametrize("ending", ["| head -1", ">&-", "2>&-", "> /dev/full"])
def test_an_output_that_breaks_ends_no_run(ending, tmp_path):
    """Its logs are in its files."""
    (tmp_path / "program.py").write_text(PRINTS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; '{sys.executable}' program.py {ending}"],
        cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (tmp_path / "done").exists()
    assert done.returncode == 7
    assert "Error" not in done.stderr


# ------------------------------------------------------------------------------------------ signals
def test_a_second_interrupt_leaves_at_once():
    done = python(
        "import os, signal, time, mooss_common\n"
        "stop = mooss_common.StopRequest()\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "print(int(stop.signal), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "time.sleep(5)\n"
        "print('still here')")
    assert done.returncode == 128 + signal.SIGINT
    assert done.stdout == "2\n"
    assert "again to leave without" in done.stderr


@BOTH
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("seconds", [0.3, 2.0])
def test_a_signal_in_the_first_seconds_leaves_quietly(seconds, number, module, tmp_path):
    """While python imports, while a backend for OpenGL is looked for, while networks are built."""
    process = subprocess.Popen(
        [sys.executable, module.__file__, "--run-root", str(tmp_path / "runs"), "--device", "cpu"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        start_new_session=True)
    time.sleep(seconds)
    begun = any((tmp_path / "runs").glob("*/args.json"))
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    assert "Traceback" not in said, said
    assert process.returncode in (128 + number, -number)
    if not begun:
        assert not list(tmp_path.glob("runs/*/*.pt"))
