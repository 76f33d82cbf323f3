"""What the tests of both scripts' command lines share."""

import ast
import contextlib
import dataclasses
import io
import math
import os
import re
import subprocess
import sys
import types
import typing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mooss_common as common


# ------------------------------------------------------------------------------- one command line
def typed(module, *words):
    """The arguments that a command line gives, every preset filled in."""
    return module.resolve_args(common.parse_args(module.Args, module.fill_presets, list(words)))


def run_line(module, main, words):
    """Exit code of a command line with `main` in the place of the script's own, and what it said
    on standard error and output."""
    error = io.StringIO()
    output = io.StringIO()
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(output):
        with pytest.raises(SystemExit) as exit_:
            common.exit_with(
                lambda: main(common.parse_args(module.Args, module.fill_presets, list(words))))
    return exit_.value.code, error.getvalue(), output.getvalue()


def script(module, *words, cwd, **environment):
    """The script as a process of its own."""
    return subprocess.run(
        [sys.executable, module.__file__, *words], cwd=cwd, capture_output=True, text=True,
        env={**os.environ, **environment})


def changed_fields(args, other):
    """Names of the fields in which two sets of arguments differ."""
    names = [field.name for field in dataclasses.fields(args)]
    return {name for name in names if getattr(args, name) != getattr(other, name)}


def unset_fields(args):
    return [field.name for field in dataclasses.fields(args) if getattr(args, field.name) is None]


# ------------------------------------------------------------------------------------------ checks
def fields_never_read(module):
    """Fields of Args that neither the script nor the common file reads from an `args`."""
    read = set()
    for path in (module.__file__, common.__file__):
        for node in ast.walk(ast.parse(Path(path).read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = getattr(node.value, "id", getattr(node.value, "attr", ""))
                if owner == "args":
                    read.add(node.attr)
    return [field.name for field in dataclasses.fields(module.Args) if field.name not in read]


def help_lines(module, *words):
    """What --help says of each flag: its name to its meaning, default included."""
    code, _, text = run_line(module, lambda args: 1, [*words, "--help"])
    assert code == 0
    words = " ".join(text.replace("│", " ").split())
    # An entry begins with a flag; the second name of a switch, `--no-...`, follows a comma.
    entries = re.split(r"(?<!,) (?=--[a-z][a-z0-9-]*(?:,| [A-Z{\[]| \S+\|))", words)
    found = {}
    for entry in entries:
        if entry.startswith("--"):
            name = entry.split()[0].strip(",").removeprefix("--").replace("-", "_")
            found[name] = entry
    return found


def assert_refused(make_args, name, value):
    """A value is refused in one sentence that names its flag."""
    with pytest.raises(common.UsageError) as refusal:
        make_args(**{name: value})
    sentence = str(refusal.value)
    assert "\n" not in sentence
    assert common.flag(name) in sentence


def assert_refused_without_a_trace(done, expected, folder):
    """A process that ended with code 2, said `expected` without a traceback, and wrote nothing."""
    assert done.returncode == 2, done.stderr
    assert expected in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    assert not any(folder.iterdir())


# -------------------------------------------------------------------------------- any command line
# Sizes that would only make the test slow are drawn small; every other number comes from the whole
# range.
SMALL = {
    "frame_stack", "render_size", "image_size", "batch_size", "aux_batch_size", "hidden_dim",
    "hidden_units", "num_filters", "channels", "state_dim", "head_dim", "decoder_depth", "seq_len",
    "num_atoms", "multi_step", "buffer_size", "decoder_heads", "filter_sizes", "strides",
    "crop_pad", "init_steps", "min_replay"}
# Where and how a run runs: not a matter of agent and replay.
NOT_HERE = {
    "resume", "eval_only", "checkpoint", "run_root", "track", "capture_video", "device",
    "replay_device", "compile", "torch_deterministic", "amp"}
INTEGERS = st.sampled_from([-1, 0, 1, 2, 3, 4, 5, 7, 8, 12, 16, 20, 24, 28])
HUGE = st.sampled_from([99, 1000, 10**6, 2**31, 10**18])
NUMBERS = st.sampled_from(
    [-1.0, 0.0, 1e-30, 1e-4, 0.05, 0.5, 0.999, 1.0, 1.5, 10.0, 1e9, 1e30, math.inf, math.nan])
WORDS = st.sampled_from(
    ["mooss", "a-b", "../x", "cartpole-swingup", "ALE/Pong-v5", "Breakout", "/", ""])


def values(name, kind):
    """Words for a flag of this type: mostly of its kind, now and then nonsense."""
    if isinstance(kind, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not types.NoneType)
    if typing.get_origin(kind) is tuple:
        element = typing.get_args(kind)[0]
        any_length = Ellipsis in typing.get_args(kind)
        size = dict(max_size=4) if any_length else dict(min_size=2, max_size=2)
        return st.lists(values(name, element).map(lambda words: words[0]), **size)
    if typing.get_origin(kind) is typing.Literal:
        good = st.sampled_from(typing.get_args(kind))
    elif kind is int:
        good = INTEGERS if name in SMALL else st.one_of(INTEGERS, HUGE)
    elif kind is float:
        good = NUMBERS
    else:
        good = WORDS
    either = st.one_of(good, good, good, good, good, good, st.just("rubbish"))
    return either.map(lambda value: [str(value)])


def command_lines(args_class):
    """One to four flags with values, as typed."""
    def flag(field):
        name = common.flag(field.name)
        if field.type is bool:
            return st.sampled_from([[name], [name.replace("--", "--no-")]])
        return values(field.name, field.type).map(lambda words: [name, *words])

    fields = [field for field in dataclasses.fields(args_class) if field.name not in NOT_HERE]
    lines = st.lists(st.sampled_from(fields).flatmap(flag), min_size=1, max_size=4)
    return lines.map(lambda parts: sum(parts, []))


def as_words(flags):
    """A dictionary of flags as one would type it."""
    words = []
    for name, value in flags.items():
        words.append(common.flag(name))
        words += map(str, value if isinstance(value, tuple) else (value,))
    return words


def assert_any_line_works_or_is_one_sentence(module, flags, attempt, examples=150):
    """`attempt(args)` after any change of `flags` works, or the change is refused in one sentence.

    Both must happen often, or the test would say little.
    """
    counts = {0: 0, 2: 0}

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None,
              suppress_health_check=list(HealthCheck))
    @given(command_lines(module.Args))
    def check(words):
        line = [*as_words(flags), *words]
        code, said, _ = run_line(module, lambda args: attempt(args) or 0, line)
        counts[code] += 1
        sentence = re.fullmatch(r"error: [^\n]+\n", said)
        # What is no value of a flag's type at all is refused by tyro, in a box of its own.
        assert code == 0 or sentence or "--help" in said, f"{' '.join(words)}: {said}"

    check()
    assert min(counts.values()) >= examples // 8, counts
