"""Any command line either builds an agent that learns or is refused with one sentence and exit code 2."""

import contextlib
import dataclasses
import io
import math
import re
import subprocess
import sys
import types
import typing

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mooss_common as common
import rainbow_mooss_atari as atari
import sac_mooss_dmc as dmc
from conftest import ROOT, TINY, TINY_ATARI

CPU = torch.device("cpu")
BASES = {"dmc": (dmc, TINY), "atari": (atari, TINY_ATARI)}
# Sizes that would only make the test slow are drawn small; every other number comes from the whole range.
SMALL = {"frame_stack", "render_size", "image_size", "batch_size", "aux_batch_size", "hidden_dim", "hidden_units",
         "num_filters", "channels", "state_dim", "head_dim", "decoder_depth", "seq_len", "num_atoms", "multi_step",
         "buffer_size", "decoder_heads", "filter_sizes", "strides", "crop_pad", "init_steps", "min_replay"}
NOT_HERE = {"resume", "eval_only", "checkpoint", "run_root", "track", "capture_video", "device", "replay_device",
            "compile", "torch_deterministic", "amp"}  # where and how to run: not a matter of agent and replay
INTEGERS = st.sampled_from([-1, 0, 1, 2, 3, 4, 5, 7, 8, 12, 16, 20, 24, 28])
HUGE = st.sampled_from([99, 1000, 10**6, 2**31, 10**18])
NUMBERS = st.sampled_from([-1.0, 0.0, 1e-30, 1e-4, 0.05, 0.5, 0.999, 1.0, 1.5, 10.0, 1e9, 1e30, math.inf, math.nan])


def values(name, kind):
    """Words for a flag of this type: mostly of its kind, now and then nonsense."""
    if isinstance(kind, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not types.NoneType)
    if typing.get_origin(kind) is tuple:
        element = typing.get_args(kind)[0]
        size = dict(min_size=2, max_size=2) if Ellipsis not in typing.get_args(kind) else dict(max_size=4)
        return st.lists(values(name, element).map(lambda words: words[0]), **size)
    if typing.get_origin(kind) is typing.Literal:
        good = st.sampled_from(typing.get_args(kind))
    elif kind is int:
        good = INTEGERS if name in SMALL else st.one_of(INTEGERS, HUGE)
    elif kind is float:
        good = NUMBERS
    else:
        good = st.sampled_from(["mooss", "a-b", "../x", "cartpole-swingup", "ALE/Pong-v5", "Breakout", "/", ""])
    return st.one_of(good, good, good, good, good, good, st.just("rubbish")).map(lambda value: [str(value)])


def command_lines(args_class):
    """One to four flags with values, as typed."""
    def flag(field):
        name = field.name.replace("_", "-")
        if field.type in (bool, bool | None):
            return st.sampled_from([[f"--{name}"], [f"--no-{name}"]])
        return values(field.name, field.type).map(lambda words: [f"--{name}", *words])

    fields = [field for field in dataclasses.fields(args_class) if field.name not in NOT_HERE]
    return st.lists(st.sampled_from(fields).flatmap(flag), min_size=1, max_size=4).map(lambda parts: sum(parts, []))


def tiny_flags(base):
    return [word for name, value in base.items() if name != "device" for word in
            (f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else (value,)))]


def try_dmc(args):
    """Replay, agent and two updates."""
    args = dmc.resolve_args(args)
    shape = (args.frame_stack, 3, args.render_size, args.render_size)
    replay = common.place_replay("cpu", CPU, lambda device: dmc.SequenceReplay(
        args.buffer_size, shape[1:], 2, args.frame_stack, args.seed, device))
    agent = dmc.Agent(args, shape, 2, CPU)
    for row in range(min(args.init_steps, 3 * args.seq_len) + 1):
        replay.add(np.full(shape[1:], row, np.uint8), np.zeros(2, np.float32) if row else None, 1.0, False)
    for update in range(2):
        agent.update(replay, update, log=True)
    assert agent.act(np.zeros(shape, np.uint8)).shape == (2,)


def try_atari(args):
    args = atari.resolve_args(args)
    shape = (args.frame_stack, 1 if args.gray_scale else 3, args.image_size, args.image_size)
    replay = common.place_replay("cpu", CPU, lambda device: atari.SequenceReplay(
        args.buffer_size, shape[1:], args.frame_stack, args.seq_len, args.multi_step, device))
    agent = atari.Agent(args, shape, 3, CPU)
    for row in range(args.min_replay):
        replay.add(np.full(shape[1:], row % 256, np.uint8), row % 3, 1.0, row % 13 == 12)
    for update in range(2):
        agent.update(replay, update, 0.5, log=True)
    assert agent.act(np.zeros((1, *shape), np.uint8), noisy=True).shape == (1,)


@pytest.mark.parametrize("script", BASES)
def test_any_command_line_works_or_is_one_sentence(script):
    module, base = BASES[script]
    attempt = {"dmc": try_dmc, "atari": try_atari}[script]
    counts = {0: 0, 2: 0}

    @settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(command_lines(module.Args))
    def check(words):
        error = io.StringIO()
        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(error), pytest.raises(SystemExit) as exit_:
            common.run_cli(module.Args, lambda args: attempt(args) or 0, [*tiny_flags(base), *words])
        code, said = exit_.value.code, error.getvalue()
        counts[code] += 1
        assert code == 0 or re.search(r"^error: [^\n]+\n$", said) or "For full helptext" in said, said

    check()
    print(f"{script}: {counts[0]} command lines worked, {counts[2]} were refused")
    assert min(counts.values()) >= 40


@pytest.mark.parametrize("file,words", [
    ("sac_mooss_dmc.py", "--exp-name ../x"), ("sac_mooss_dmc.py", "--seq-len 0"), ("sac_mooss_dmc.py", "--tau0 nan"),
    ("rainbow_mooss_atari.py", "--v-min 3 --v-max 3"), ("rainbow_mooss_atari.py", "--channels 32 64"),
    ("rainbow_mooss_atari.py", "--env-id ../Pong")])
def test_a_refusal_leaves_nothing_behind(file, words, tmp_path):
    done = subprocess.run([sys.executable, str(ROOT / file), *words.split()], cwd=tmp_path, capture_output=True,
                          text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert not any(tmp_path.iterdir())
