"""A tiny run in a process of its own, with a fault that strikes at a chosen moment.

`Runner` forks each run from a server that has everything imported, so that a run costs a second and
can be killed.
"""

import contextlib
import functools
import multiprocessing.forkserver
import os
import resource
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.utils.tensorboard  # noqa: F401 (imported here, it costs the forked runs nothing)

import mooss_common as common
import rainbow_mooss_atari as atari
import sac_mooss_dmc as dmc
from helpers.tiny import ATARI_FLAGS, DMC_FLAGS, make_dot_env, make_dot_game

TESTS = Path(__file__).resolve().parent.parent

# The script, the flags and the environment of each kind of run: two with the dot, two with a real
# simulator.
SCRIPTS = {
    "dmc": (dmc, make_dot_env, dict(
        DMC_FLAGS, total_timesteps=120, eval_every=40, checkpoint_every=20, log_every=4,
        buffer_size=40, preset="laptop")),
    "atari": (atari, make_dot_game, dict(
        ATARI_FLAGS, total_timesteps=70, eval_every=30, checkpoint_every=10, log_every=4,
        buffer_size=50, preset="laptop")),
    "reacher": (dmc, dmc.make_env, dict(
        DMC_FLAGS, env_id="reacher-easy", total_timesteps=400, eval_every=400, eval_episodes=1,
        checkpoint_every=100, action_repeat=8, log_every=4, preset="laptop")),
    "breakout": (atari, atari.make_env, dict(
        ATARI_FLAGS, total_timesteps=80, checkpoint_every=25, eval_episodes=1, max_frames=240,
        log_every=4, preset="laptop")),
}


def strike_at(number, action):
    """A function that counts its calls and acts at the `number`-th."""
    calls = iter(range(1, 10**9))
    return lambda: action() if next(calls) == number else None


def before(owner, name, hook):
    """Call `hook` before every call of owner.name."""
    function = getattr(owner, name)

    def call(*args, **kwargs):
        hook()
        return function(*args, **kwargs)

    setattr(owner, name, call)


def child(script, flags, fault, root, step_seconds):
    """What the forked process does.

    `fault` is (where, number, signal): strike before the `number`-th such call. In `steps.txt` it
    leaves a byte for every step of an environment, in training and in evaluations.
    """
    output = os.open(root / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    steps = os.open(root / "steps.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    torch.set_num_threads(1)
    module, make, defaults = SCRIPTS[script]
    where, number, what = fault or (None, 0, 0)
    strike = strike_at(number, lambda: os.kill(os.getpid(), what))

    def on_step():
        os.write(steps, b".")
        time.sleep(step_seconds)
        if where in ("step", "step under nohup"):
            strike()

    def make_env(*args, **kwargs):
        env = make(*args, **kwargs)
        before(env.unwrapped, "step", on_step)
        return env

    module.make_env = make_env
    if where == "step under nohup":
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    elif where in ("replace", "fsync"):
        before(os, where, strike)
    elif where == "half":
        torch.save = half_saved(strike)
    elif where == "size":  # no file may grow beyond this many bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))
    common.exit_with(lambda: module.main(module.Args(**{**defaults, **flags})))


def half_saved(strike):
    """A torch.save that is struck in the middle of a checkpoint or of a piece of the replay."""
    save = torch.save

    def half(data, file):
        file.write(b"PK half a file")
        file.flush()
        strike()
        file.seek(0)
        file.truncate()
        save(data, file)

    return half


@functools.cache
def start_server():
    """The process that all runs are forked from. It finds modules by PYTHONPATH alone."""
    Runner.context.set_forkserver_preload(["helpers.tiny_run"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), str(TESTS.parent)]))
        multiprocessing.forkserver.ensure_running()


class Runner:
    """Runs of one script below one folder; `notes`, where they say what they do, may be another."""

    context = multiprocessing.get_context("forkserver")

    def __init__(self, script, root, notes=None):
        start_server()
        self.script = script
        self.root = root
        self.notes = notes or root
        env_id = SCRIPTS[script][2]["env_id"]
        self.folder = root / f"{env_id}__mooss__s1"
        root.mkdir(exist_ok=True, parents=True)

    def start(self, fault=None, step_seconds=0.0, **flags):
        flags = {"run_root": str(self.root), "resume": True, **flags}
        process = self.context.Process(
            target=child, args=(self.script, flags, fault, self.notes, step_seconds))
        process.start()
        return process

    def run(self, fault=None, step_seconds=0.0, **flags):
        """The exit code, negative for a signal that was not caught."""
        process = self.start(fault, step_seconds, **flags)
        process.join(120)
        assert process.exitcode is not None, f"still running: {self.said()}"
        return process.exitcode

    def said(self):
        """What all runs so far have printed."""
        log = self.notes / "log.txt"
        return log.read_text() if log.exists() else ""

    def steps(self):
        """How many steps of environments the last run took, or is at."""
        file = self.notes / "steps.txt"
        return file.stat().st_size if file.exists() else 0

    def wait_until(self, condition, seconds=60):
        deadline = time.time() + seconds
        while not condition():
            assert time.time() < deadline, self.said()
            time.sleep(0.02)


@contextlib.contextmanager
def small_disk(path, size):
    """A tmpfs of `size` bytes, or None where mounting is not allowed."""
    path.mkdir()
    mounted = os.system(f"mount -t tmpfs -o size={size} tmpfs {path} 2>/dev/null") == 0
    try:
        yield path if mounted else None
    finally:
        if mounted:
            os.system(f"umount -l {path}")
