"""A tiny run in a process of its own, with a fault that strikes at a chosen moment.

`Runner` forks each run from a server that has everything imported, so that a run costs a second and can be killed.
"""

import contextlib
import functools
import multiprocessing.forkserver
import os
import resource
import time

import pytest
import torch
import torch.utils.tensorboard  # noqa: F401 (imported here, it costs the forked runs nothing)

import mooss_common as common
import rainbow_mooss_atari as atari
import sac_mooss_dmc as dmc
from conftest import ROOT, TINY, TINY_ATARI, make_dot_env, make_dot_game

SCRIPTS = {
    "dmc": (dmc, dict(TINY, total_timesteps=120, eval_every=40, checkpoint_every=20, log_every=4, buffer_size=40,
                      preset="laptop"), make_dot_env),
    "atari": (atari, dict(TINY_ATARI, total_timesteps=70, eval_every=30, checkpoint_every=10, log_every=4,
                          buffer_size=50, preset="laptop"), make_dot_game),
    "reacher": (dmc, dict(TINY, env_id="reacher-easy", total_timesteps=400, eval_every=400, eval_episodes=1,
                          checkpoint_every=100, action_repeat=8, log_every=4, preset="laptop"), dmc.make_env),
    "breakout": (atari, dict(TINY_ATARI, total_timesteps=80, checkpoint_every=25, eval_episodes=1, max_frames=240,
                             log_every=4, preset="laptop"), atari.make_env)}


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


def child(script, flags, fault, log, step_seconds):
    """What the forked process does. `fault` is (where, number, signal): strike before the number-th such call."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    module, defaults, make = SCRIPTS[script]
    where, number, what = fault or (None, 0, 0)
    strike = strike_at(number, lambda: os.kill(os.getpid(), what))

    def make_env(*args, **kwargs):
        env = make(*args, **kwargs)
        before(env.unwrapped, "step", strike if where == "step" else lambda: time.sleep(step_seconds))
        return env

    module.make_env = make_env
    if where in ("replace", "fsync"):
        before(os, where, strike)
    elif where == "half":  # in the middle of writing a checkpoint or a piece of the replay
        def half(data, file, save=torch.save):
            file.write(b"PK half a file")
            file.flush()
            strike()
            file.seek(0)
            file.truncate()
            save(data, file)
        torch.save = half
    elif where == "size":  # no file may grow beyond this many bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))
    common.exit_with(lambda: module.main(module.Args(**{**defaults, **flags})))


@functools.cache
def start_server():
    """The process that all runs are forked from. It finds what it shall import by PYTHONPATH alone."""
    Runner.context.set_forkserver_preload(["tiny_run"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), str(ROOT)]))
        multiprocessing.forkserver.ensure_running()


class Runner:
    """Runs of one script below one folder."""

    context = multiprocessing.get_context("forkserver")

    def __init__(self, script, root):
        start_server()
        self.script, self.root, self.log = script, root, root / "log.txt"
        env_id, seed = SCRIPTS[script][1]["env_id"], 1
        self.folder = root / f"{env_id}__mooss__s{seed}"
        root.mkdir(exist_ok=True, parents=True)

    def start(self, fault=None, step_seconds=0.0, **flags):
        flags = {"run_root": str(self.root), "resume": True, **flags}
        process = self.context.Process(target=child, args=(self.script, flags, fault, str(self.log), step_seconds))
        process.start()
        return process

    def run(self, fault=None, **flags):
        """The exit code, negative for a signal that was not caught."""
        process = self.start(fault, **flags)
        process.join(120)
        assert process.exitcode is not None, f"still running: {self.said()}"
        return process.exitcode

    def said(self):
        return self.log.read_text() if self.log.exists() else ""

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
