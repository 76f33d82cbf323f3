"""Small helpers that both MOOSS scripts share: command line, devices, OpenGL, run folder, logs,
checkpoints, signals. Nothing in this file teaches anything about the method; read
`sac_mooss_dmc.py` or `rainbow_mooss_atari.py` for that.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import difflib
import errno
import fcntl
import functools
import importlib.metadata
import inspect
import io
import json
import math
import os
import pickle
import platform
import re
import shlex
import signal
import struct
import subprocess
import sys
import time
import typing
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
import tqdm
import tyro

FORMAT = 4  # of checkpoints
CHECKPOINTS = ("checkpoint.pt", "checkpoint_previous.pt")  # to go on with
AGENT_FILE = "agent.pt"  # to use
# What a file to use holds, and what one to go on with holds besides.
AGENT_KEYS = dict(script=str, step=int, args=dict, agent_shape=tuple, agent=dict)
RUN_KEYS = dict(
    AGENT_KEYS, counters=dict, metrics=dict, optimizers=dict, replay=dict, replay_pieces=list,
    logger=dict, torch_rng=torch.Tensor, cuda_rng=list)
# Flags that touch where and how a run runs, not what it computes: they may change at a resume.
FREE_TO_CHANGE = set(
    "resume run_root checkpoint_every device replay_device capture_video track wandb_project "
    "wandb_entity wandb_group eval_only checkpoint source provenance".split())


class UsageError(Exception):
    """An error that a person can cause and mend: one sentence, and the process ends with code 2."""


def require(condition, sentence):
    if not condition:
        raise UsageError(sentence)


# ------------------------------------------------------------------------------------ command line
def parse_args(args_class, fill_presets, argv):
    """The command line as Args, with a group in --help for each heading in the source of Args.

    What is not typed takes, and --help shows, what the presets say.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--env-id", "--env_id", default=args_class.env_id)
    first.add_argument("--preset", default=args_class.preset)
    defaults = args_class(**vars(first.parse_known_args(argv)[0]))
    with contextlib.suppress(KeyError):  # an unknown preset: tyro says so in a moment
        defaults = fill_presets(defaults)

    types = {field.name: field.type for field in dataclasses.fields(args_class)}
    parts = re.split(r"\n\n    # (.+)\n\n", inspect.getsource(args_class))
    a_flag = re.compile(r"(?:^    # (.+)\n)?^    (\w+): [^#\n]*(?:# (.+))?$", re.M)
    groups = []
    for title, part in zip(["run", *parts[1::2]], parts[::2]):
        # A flag's help is the comment beside it, or the one above it.
        group = dataclasses.make_dataclass(title.replace(" ", "_"), [
            (name, typing.Annotated[types[name], tyro.conf.arg(help=above or beside)],
             getattr(defaults, name)) for above, name, beside in a_flag.findall(part)])
        groups.append((group.__name__, group, dataclasses.field(default_factory=group)))
    flags = tyro.conf.OmitArgPrefixes[dataclasses.make_dataclass("Flags", groups)]
    typed = vars(tyro.cli(flags, args=argv, description=inspect.getdoc(args_class)))
    return args_class(**{name: x for group in typed.values() for name, x in vars(group).items()})


def run_cli(args_class, fill_presets, main, argv=None):
    """Parse the command line, run `main(args)` and exit with its code."""
    argv = sys.argv[1:] if argv is None else argv
    exit_with(lambda: main(parse_args(args_class, fill_presets, argv)))


class LastingOutput:
    """A stream that may break (`| head -1`) or lack a letter: a run has its logs in files."""

    def __init__(self, number, stream):
        self.stream = stream or open(number, "w")
        with contextlib.suppress(AttributeError):
            self.stream.reconfigure(errors="replace")

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


def exit_with(function):
    """Exit with the code that `function()` returns; what a person can mend is one sentence."""
    while os.open(os.devnull, os.O_RDWR) <= 2:
        pass  # a standard stream that is closed must not become a file of the run
    with (contextlib.redirect_stdout(LastingOutput(1, sys.stdout)),
          contextlib.redirect_stderr(LastingOutput(2, sys.stderr))):
        try:
            sys.exit(function())
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
        except UsageError as error:
            sentence = error
        except OSError as error:
            where = f" {error.filename}" if error.filename else ""
            sentence = (f"cannot use{where or ' a file'} ({error.strerror or error}): mend it, "
                        "then repeat the command with --resume")
        except (MemoryError, RuntimeError) as error:
            known = "(out of|allocate|enough) memory|could not create a primitive"
            if isinstance(error, RuntimeError) and not re.search(known, str(error)):
                raise
            sentence = "out of memory: choose smaller sizes, such as those of --preset laptop"
        print(f"error: {sentence}", file=sys.stderr)
        sys.exit(2)


def flag(name):
    return "--" + name.replace("_", "-")


def check_ranges(args, ranges):
    """Flags that are named lie in their ranges, choices are known, and all numbers are finite."""
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        numbers = value if isinstance(value, (tuple, list)) else (value,)
        finite = all(math.isfinite(x) for x in numbers if isinstance(x, float))
        require(finite, f"{flag(field.name)} {value} is not a finite number")
        if typing.get_origin(field.type) is typing.Literal:
            known = typing.get_args(field.type)
            require(value in known, f"{flag(field.name)} {value} is unknown: use one of {known}")
    for names, (low, high) in ranges.items():
        for name in names.split():
            value = getattr(args, name)
            require(low <= value <= high, f"{flag(name)} {value} is out of range: it must be "
                    f"between {low} and {high}")


def check_divides(args, **parts):
    """Each flag divides the one it is given for: `whole="part"`."""
    for whole, part in parts.items():
        a, b = getattr(args, whole), getattr(args, part)
        require(a % b == 0, f"{flag(part)} {b} does not divide {flag(whole)} {a}")


def check_names(args):
    """What becomes part of a folder's name must not lead out of the run root."""
    for name, parts in (("env_id", args.env_id.split("/")), ("exp_name", [args.exp_name])):
        good = all(re.fullmatch(r"[A-Za-z0-9_.+=-]{1,100}", x) and set(x) != {"."} for x in parts)
        require(good, f"{flag(name)} {getattr(args, name)!r} cannot be part of a folder's name: "
                "use letters, digits and _ . + = -")


def require_known(flag, name, names):
    near = ", ".join(difflib.get_close_matches(name, names, n=3, cutoff=0.0))
    require(name in names, f"{flag} {name} is unknown: the nearest names are {near}")


# ------------------------------------------------------------------------------- seeds and devices
def derive_seed(*parts):
    """A 32-bit seed from numbers and words, so that streams never overlap by arithmetic."""
    numbers = [part if isinstance(part, int) else zlib.crc32(part.encode()) for part in parts]
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def pick_device(name):
    """`auto`, `cpu`, `cuda` or `cuda:N`, checked."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    known = re.fullmatch(r"cpu|cuda(:\d{1,3})?", name)
    require(known, f"--device {name} is unknown: use auto, cpu, cuda or cuda:N")
    device = torch.device("cuda:0" if name == "cuda" else name)
    count = torch.cuda.device_count()
    require(name == "cpu" or device.index < count,
            f"--device {name} does not exist: torch sees {count} GPUs, counted from 0")
    return device


def configure_torch(seed, device, deterministic):
    """Seed torch and choose speed (TF32, cuDNN autotuning) or determinism, in one place."""
    torch.manual_seed(seed)  # nothing here uses numpy's or Python's global generators
    with contextlib.suppress(OSError, AttributeError):
        # glibc shall keep large blocks that are freed: to get fresh ones costs more than to use
        # them (M_MMAP_MAX = -4, M_TRIM_THRESHOLD = -1).
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)
        libc.mallopt(-1, 2**31 - 1)
    # In the convolutions, which cost most; matrix products stay in full fp32.
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = device.type == "cuda" and not deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic, warn_only=True)


def upload(tensors, device):
    """Tensors on the device; from the CPU to a GPU through pinned memory, so that nobody waits."""
    if isinstance(tensors, torch.Tensor):
        if tensors.device.type == "cpu" and device.type == "cuda":
            tensors = tensors.pin_memory()
        return tensors.to(device, non_blocking=True)
    return [upload(tensor, device) for tensor in tensors]


def compiled(function):
    """torch.compile for fixed shapes; where it fails, torch warns and goes on without."""
    torch._dynamo.config.trace_autograd_ops = True  # so that a backward pass is part of the graph
    torch._dynamo.config.suppress_errors = True
    return torch.compile(function, dynamic=False)


def check_observation(obs, shape):
    if tuple(obs.shape[-4:]) != shape or obs.dim() > 5 or obs.dtype != torch.uint8:
        raise ValueError(f"act takes an observation {shape} or many {('N', *shape)} in bytes "
                         f"(uint8), not {tuple(obs.shape)} in {obs.dtype}")


def require_finite(agent, step, run_dir):
    """Stop a run whose losses or weights are not all finite, before anything is saved over."""
    values = {name: x for name, x in agent.metrics.items() if name.startswith("losses/")}
    values |= agent.state_dict()
    bad = [name for name, x in values.items() if not torch.as_tensor(x).isfinite().all()]
    last = run_dir / CHECKPOINTS[0]
    require(not bad, f"{', '.join(bad[:3])} became infinite or not a number by step {step:,}; the "
            f"last good checkpoint is {last if last.exists() else 'not written yet'}")


def free_memory(device):
    """Bytes that can still be allocated on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
    return 1024 * int(available[1])


def replay_bytes(replay):
    return sum(getattr(replay, name).nbytes for name in replay.columns)


def place_replay(choice, device, replay_class, *shape):
    """Build the replay where it fits. auto: on the GPU if that leaves half of its free memory."""
    size = replay_bytes(replay_class(*shape, torch.device("meta")))
    if choice == "auto":
        fits = device.type == "cuda" and size < free_memory(device) / 2
        choice = "cuda" if fits else "cpu"
    require(choice == "cpu" or device.type == "cuda",
            f"--replay-device cuda needs --device cuda, not {device}")
    home = device if choice == "cuda" else torch.device("cpu")
    free = free_memory(home)
    require(size < free, f"the replay needs {size / 1e9:.2f} GB but only {free / 1e9:.2f} GB are "
            f"free on {home}: choose a smaller --buffer-size")
    return replay_class(*shape, home)


# ------------------------------------------------------------------------------------------ OpenGL
GL_PROBE = """
from dm_control import mujoco
xml = '<mujoco><worldbody><light pos="0 0 2"/><geom size="1"/></worldbody></mujoco>'
assert mujoco.Physics.from_xml_string(xml).render(16, 16).any()
"""
# EGL counts the GPUs in an order of its own; an attribute tells CUDA's number (0x323A).
EGL_PROBE = """
import ctypes, sys
from dm_control._render.pyopengl import egl_ext
egl = ctypes.CDLL("libEGL.so.1")
egl.eglGetProcAddress.restype = ctypes.c_void_p
address = egl.eglGetProcAddress(b"eglQueryDeviceAttribEXT")
query = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_ssize_t))(address)
for index, egl_device in enumerate(egl_ext.eglQueryDevicesEXT()):
    number = ctypes.c_ssize_t(-1)
    if query(egl_device, 0x323A, number) and number.value == int(sys.argv[1]):
        print(index)
"""


def probe_gl(code, *words, **setting):
    """What a program in a process of its own prints; None if it fails or hangs."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run([sys.executable, "-c", code, *words], env={**os.environ, **setting},
                              capture_output=True, text=True, timeout=60)
        return done.stdout.strip() if done.returncode == 0 else None


@functools.cache
def use_headless_gl(device):
    """Set MUJOCO_GL, which dm_control reads on import, to a backend that really renders a frame."""
    asked = os.environ.get("MUJOCO_GL")
    settings = [{"MUJOCO_GL": name} for name in ((asked,) if asked else ("egl", "osmesa", "glfw"))]
    if (device.type == "cuda" and settings[0]["MUJOCO_GL"] == "egl"
            and "MUJOCO_EGL_DEVICE_ID" not in os.environ):
        index = probe_gl(EGL_PROBE, str(device.index), MUJOCO_GL="egl")
        if index:  # render on the GPU that trains
            settings.insert(0, {"MUJOCO_GL": "egl", "MUJOCO_EGL_DEVICE_ID": index})
    for setting in settings:
        if probe_gl(GL_PROBE, **setting) is not None:
            os.environ.update(setting)
            return setting["MUJOCO_GL"]
    require(not asked, f"MUJOCO_GL={asked} cannot render here: unset it, so that a working backend "
            "is looked for")
    raise UsageError("no OpenGL backend can render here: install EGL (Debian, Ubuntu: apt-get "
                     "install libegl1 libgl1-mesa-dri) or OSMesa (apt-get install libosmesa6)")


# -------------------------------------------------------------------------------------- run folder
def provenance(script, device, packages):
    """What made a run: command, commit, versions and hardware."""
    def git(*words):
        with contextlib.suppress(OSError):
            return subprocess.run(["git", *words], cwd=Path(script).resolve().parent, text=True,
                                  capture_output=True).stdout.strip()
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        with contextlib.suppress(OSError):
            cpu = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
        hardware = f"{cpu[1] if cpu else platform.machine()}, {torch.get_num_threads()} threads"
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {"command": shlex.join(["python", *sys.argv]), "commit": git("rev-parse", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
            "hardware": hardware, "python": platform.python_version(), **versions}


class RunFolder:
    """`runs/{env_id}__{exp_name}__s{seed}/`, claimed by one process at a time.

    `may_change` names flags of the script that may differ when a run is resumed.
    """

    def __init__(self, args, script, may_change=()):
        self.args = args
        self.script = Path(script)
        self.may_change = {*FREE_TO_CHANGE, *may_change}
        name = f"{args.env_id.replace('/', '-')}__{args.exp_name}__s{args.seed}"
        self.path = Path(args.run_root) / name

    def described(self):
        """All that decides what a run computes: its flags, its script, and the script's source."""
        flags = json.loads(json.dumps(dataclasses.asdict(self.args)))
        source = f"{zlib.crc32(self.script.read_bytes()):08x}"
        return {**flags, "script": self.script.stem, "source": source}

    def check(self):
        """Refuse in the first second, and without writing, a folder that is not ours to write."""
        path, saved = self.path, self.path / "args.json"
        if not path.exists():
            return
        require(self.args.resume, f"{path} exists: add --resume, or choose another --exp-name")
        require(path.is_dir(), f"{path} is not a folder: choose another --exp-name")
        if saved.is_file():
            with reading(saved):
                self.refuse_other_args(json.loads(saved.read_text()))
        else:
            begun = {".lock", "args.json.new"}  # what a run leaves that is killed this early
            foreign = {file.name for file in path.iterdir()} - begun
            require(not foreign, f"{path} holds no run of ours")

    def refuse_other_args(self, before):
        """A run continues with the flags and the script it began with."""
        now = self.described()
        differs = [f"{name} was {before.get(name)!r}, is {now.get(name)!r}"
                   for name in sorted(now.keys() | before.keys())
                   if name not in self.may_change and now.get(name) != before.get(name)]
        require(not differs, f"{self.path} was made with other settings ({'; '.join(differs)})")
        if before.get("source") != now["source"]:
            print(f"{self.script.name} has changed since {self.path} was begun", file=sys.stderr)

    def claim(self, made_by):
        """Create and lock the folder; the lock goes with the process, a dead one blocks nobody."""
        try:
            self.path.mkdir(parents=True, exist_ok=self.args.resume)
            self.lock = open(self.path / ".lock", "w")
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"another process is running in {self.path}") from error
        text = json.dumps({**self.described(), "provenance": made_by}, indent=1)
        write_atomically(self.path / "args.json", text.encode())
        return self.path


def write_atomically(path, data):
    """Write beside, flush to disk, rename: a reader finds the old file or the new one, whole."""
    beside = path.with_name(path.name + ".new")
    try:
        with open(beside, "wb") as file:
            file.write(data) if isinstance(data, bytes) else torch.save(data, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:  # RuntimeError: how torch.save meets a full disk
        with contextlib.suppress(OSError):
            beside.unlink()
        raise UsageError(f"cannot write {path} (is the disk full?): what was saved before is "
                         "whole") from error
    os.replace(beside, path)
    folder = os.open(path.parent, os.O_RDONLY)  # the new name must reach the disk too
    os.fsync(folder)
    os.close(folder)


# ------------------------------------------------------------------------------------- checkpoints
class Checkpoints:
    """`checkpoint.pt` and the one before it, with the rows of the replay in `replay/`.

    Complete rows of a replay never change, so each checkpoint adds one file with the rows since the
    last one; files that neither checkpoint needs any more are removed. `agent.pt` is for use.
    """

    def __init__(self, folder, agent, replay):
        self.script, self.run_dir = folder.script, folder.path
        self.agent, self.replay = agent, replay
        self.pieces = []  # the files of the replay's rows that the newest checkpoint needs
        self.logger_state = None  # what a restored checkpoint says of the logs

    def save(self, counters, logger):
        agent, replay_dir = self.agent, self.run_dir / "replay"
        require_finite(agent, counters.step, self.run_dir)
        replay_dir.mkdir(exist_ok=True)
        before = self.pieces
        self.pieces = self._save_rows(replay_dir)
        on_cuda = agent.device.type == "cuda"
        weights = agent.state_dict()
        to_use = {
            "format": FORMAT, "script": self.script.stem, "step": counters.step,
            "args": dataclasses.asdict(agent.args), "agent_shape": agent.shape,
            "agent": {name: x for name, x in weights.items() if not name.startswith(agent.unused)}}
        to_go_on = {
            **to_use, "agent": weights, "counters": dataclasses.asdict(counters),
            "metrics": {key: float(value) for key, value in agent.metrics.items()},
            "optimizers": {name: x.state_dict() for name, x in agent.optimizers.items()},
            "replay": self.replay.state_dict(), "replay_pieces": self.pieces,
            "logger": logger.state(), "torch_rng": torch.get_rng_state(),
            "cuda_rng": [torch.cuda.get_rng_state(agent.device)] if on_cuda else []}
        newest, previous = (self.run_dir / name for name in CHECKPOINTS)
        if newest.exists():  # at every moment one of the two is whole
            os.replace(newest, previous)
        write_atomically(newest, to_go_on)
        write_atomically(self.run_dir / AGENT_FILE, to_use)
        needed = {piece["file"] for piece in before + self.pieces}
        for file in replay_dir.iterdir():
            if file.name not in needed:
                file.unlink()

    def _save_rows(self, replay_dir):
        """Write the rows since the last checkpoint; the pieces that hold all rows of the replay."""
        replay = self.replay
        pieces = [piece for piece in self.pieces if piece["end"] > replay.oldest_row]
        begin = pieces[-1]["end"] if pieces else replay.oldest_row
        end = replay.newest_row  # the newest row is not complete: the replay's own state has it
        if begin < end:
            pieces.append({"begin": begin, "end": end, "file": f"{begin:09d}-{end:09d}.pt"})
            slots = torch.arange(begin, end) % replay.capacity
            rows = {name: getattr(replay, name)[slots].cpu() for name in replay.columns}
            write_atomically(replay_dir / pieces[-1]["file"], rows)
        return pieces

    def restore(self, counters):
        """Load the newest whole checkpoint and return its counters; the given ones without any."""
        candidates = [self.run_dir / name for name in CHECKPOINTS]
        candidates = [path for path in candidates if path.exists()]
        for path in candidates:
            try:
                state = read_checkpoint(path, self.script, RUN_KEYS)
                with reading(path):
                    self._load(state)
                    counters = dataclasses.replace(counters, **state["counters"])
            except UsageError as error:
                print(f"skipping a checkpoint: {error}", file=sys.stderr)
                continue
            os.replace(path, candidates[0])  # a damaged one must not become the previous one
            print(f"resuming {path} at step {state['step']:,}")
            return counters
        require(not candidates, f"no checkpoint in {self.run_dir} is whole")
        return counters

    def _load(self, state):
        agent, replay = self.agent, self.replay
        for piece in state["replay_pieces"]:
            slots = torch.arange(piece["begin"], piece["end"]) % replay.capacity
            # The name alone: a checkpoint must not lead out of its own folder.
            rows = read_tensors(self.run_dir / "replay" / Path(piece["file"]).name)
            for name in replay.columns:
                getattr(replay, name)[slots] = rows[name].to(replay.device)
        self.pieces = state["replay_pieces"]
        self.logger_state = {**state["logger"], "step": state["step"]}
        replay.load_state_dict(state["replay"])
        agent.load_state_dict(state["agent"])
        agent.metrics = state["metrics"]
        for name, optimizer in agent.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        torch.set_rng_state(state["torch_rng"])
        if agent.device.type == "cuda" and state["cuda_rng"]:
            torch.cuda.set_rng_state(state["cuda_rng"][0], agent.device)


@contextlib.contextmanager
def reading(path):
    """Whatever a file's contents make go wrong in this block is one sentence."""
    try:
        yield
    except (OSError, EOFError, LookupError, ArithmeticError, AssertionError, AttributeError,
            TypeError, ValueError, RuntimeError, struct.error, zipfile.BadZipFile, zlib.error,
            pickle.UnpicklingError) as error:
        raise UsageError(f"{path} is damaged, or of another version of this program "
                         f"({type(error).__name__})") from error


def read_tensors(path):
    """torch.load without pickled code, after a look at the checksums: a zip archive has them."""
    with reading(path):
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        require(damaged is None, f"{path} is damaged: {damaged} does not match its checksum")
        return torch.load(path, map_location="cpu", weights_only=True)


def read_checkpoint(path, script, keys):
    """The contents of a checkpoint file, checked; nothing in it is executed."""
    path = Path(path)
    require(path.is_file(), f"there is no checkpoint file {path}")
    state = read_tensors(path)
    ours = isinstance(state, dict) and "format" in state
    require(ours, f"{path} is not a checkpoint of this project")
    require(state["format"] == FORMAT, f"{path} has checkpoint format {state['format']}, this "
            f"version reads format {FORMAT}")
    for name, kind in keys.items():
        require(isinstance(state.get(name), kind), f"{path} is damaged: its {name} is missing or "
                f"is not a {kind.__name__}")
    writer, reader = state["script"], Path(script).stem
    require(writer == reader, f"{path} was written by {writer}.py: use that script")
    return state


def load_agent(path, script, args_class, agent_class, device):
    """The agent of a checkpoint file or of `agent.pt`, and its step."""
    state = read_checkpoint(path, script, AGENT_KEYS)
    with reading(path):
        args = args_class(**state["args"])
        agent = agent_class(args, *state["agent_shape"], torch.device(device))
        missing, _ = agent.load_state_dict(state["agent"], strict=False)
        require(all(name.startswith(agent.unused) for name in missing), f"{path} lacks {missing}")
    return agent, state["step"]


def evaluate_only(args, load_agent, evaluate, own_flags):
    """--eval-only: the saved agent on its own task; scores and a video beside the checkpoint.

    `own_flags` names the flags that the command line decides; the others are the agent's.
    """
    device, folder = pick_device(args.device), Path(args.checkpoint).parent
    configure_torch(args.seed, device, args.torch_deterministic)
    agent, step = load_agent(args.checkpoint, device)
    require(os.access(folder, os.W_OK), f"cannot write to {folder}")
    args = dataclasses.replace(agent.args, **{name: getattr(args, name) for name in own_flags})
    stop, progress = StopRequest(), Progress(args.eval_episodes, 0)
    keep_going = progress.evaluation_of(args.eval_episodes, stop)
    video = folder / "videos" / f"eval_only_{step}.mp4"
    episodes = evaluate(agent, args, device, step, keep_going, video)
    progress.bar.close()
    stop.close()
    if episodes is None:
        return 128 + stop.signal
    path = folder / "eval_only.csv"
    table = CsvFile(path, path.read_bytes() if path.exists() else b"")
    for number, (score, length) in enumerate(episodes):
        table.write({"step": step, "episode": number, "return": f"{score:.6g}", "length": length})
    print(f"step {step:,}: return {mean_std(episodes)}; written to {path} and {video}")
    return 0


# ----------------------------------------------------------------------------------------- signals
class StopRequest:
    """Signals ask the loop to checkpoint and leave with code 128 + signal number.

    A second SIGINT leaves at once.
    """

    def __init__(self):
        self.signal = None
        names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
        self._before = {number: signal.getsignal(number)
                        for number in (getattr(signal, name) for name in names)}
        for number, handler in self._before.items():
            if handler != signal.SIG_IGN:  # as SIGHUP is under nohup
                signal.signal(number, self._ask)

    def _ask(self, number, frame):
        if number == signal.SIGINT and self.signal is not None:
            os._exit(128 + number)
        self.signal = number
        with contextlib.suppress(OSError):
            os.write(2, b"\nstopping: writing a checkpoint; Ctrl-C again to leave without\n")

    def close(self):
        for number, handler in self._before.items():
            signal.signal(number, handler)


# -------------------------------------------------------------------------------------------- logs
class CsvFile:
    """Rows written one by one after what is there already; the first one's keys are the columns."""

    def __init__(self, path, before=b""):
        self.path = path
        self.columns = before.split(b"\r\n")[0].decode().split(",") if before else None
        self.size, self.checksum = len(before), zlib.crc32(before)
        self.file = open(path, "ab", buffering=0)  # no buffer that a full disk could leave behind
        self.file.truncate(self.size)

    @classmethod
    def restored(cls, path, saved):
        """Go on where `state()` was taken."""
        before = path.read_bytes()[:saved["size"]] if path.is_file() else b""
        same = saved == {"size": len(before), "checksum": zlib.crc32(before)}
        require(same, f"{path} is not as the checkpoint left it: put its old contents back, or "
                "begin anew with another --exp-name")
        return cls(path, before)

    def write(self, row):
        if self.columns is None:
            self.columns = list(row)
            self._write_line(self.columns)
        unknown = sorted(row.keys() - set(self.columns))
        require(not unknown, f"{', '.join(unknown)} is not a column of {self.path}: what is logged "
                "must be there from the first row on")
        self._write_line(row.get(name, "") for name in self.columns)

    def _write_line(self, values):
        data = (",".join(map(str, values)) + "\r\n").encode()
        if self.file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self.size += len(data)
        self.checksum = zlib.crc32(data, self.checksum)

    def state(self):
        """Where the file ends, safe on the disk: a checkpoint relies on it."""
        os.fsync(self.file.fileno())
        return {"size": self.size, "checksum": self.checksum}


class RunLogger:
    """train.csv, eval.csv, TensorBoard and, with --track, Weights & Biases behind one call each."""

    def __init__(self, run_dir, args, saved=None):
        from torch.utils.tensorboard import SummaryWriter  # slow, and --help does not need it

        state = saved or {"hours": 0.0, "episodic_return": "", "step": 0}
        self.began, self.began_here = time.time() - 3600 * state["hours"], time.time()
        self.first_step = state["step"]
        self.episodic_return = state["episodic_return"]
        self.csv = {}
        for name in ("train", "eval"):
            path = run_dir / f"{name}.csv"
            self.csv[name] = CsvFile.restored(path, saved[name]) if saved else CsvFile(path)
        if args.track:
            start_wandb(run_dir, args)  # before the writer, which it listens to
        # What was logged after the checkpoint will be logged again.
        self.tensorboard = SummaryWriter(run_dir, purge_step=saved["step"] + 1 if saved else None)
        rows = [f"| {flag(name)} | {value} |" for name, value in dataclasses.asdict(args).items()]
        self.tensorboard.add_text("flags", "\n".join(["| flag | value |", "|---|---|", *rows]))

    @property
    def hours(self):
        return (time.time() - self.began) / 3600

    def state(self):
        files = {name: file.state() for name, file in self.csv.items()}
        return {"hours": self.hours, "episodic_return": self.episodic_return, **files}

    def episode(self, step, score):
        """The return of a training episode; the next row of train.csv will carry it."""
        self.tensorboard.add_scalar("charts/episodic_return", score, step)
        self.episodic_return = f"{score:.6g}"

    def train(self, step, update, metrics):
        values = {key: float(value) for key, value in metrics.items()}
        self.csv["train"].write({
            "step": step, "update": update, "hours": f"{self.hours:.5f}",
            "charts/episodic_return": self.episodic_return,
            **{key: f"{value:.6g}" for key, value in values.items()}})
        self.episodic_return = ""
        # Only in TensorBoard: the file shall not depend on when it was written.
        values["charts/SPS"] = (step - self.first_step) / (time.time() - self.began_here)
        for key, value in values.items():
            self.tensorboard.add_scalar(key, value, step)

    def evaluation(self, step, update, episodes):
        hours = f"{self.hours:.5f}"
        for number, (score, length) in enumerate(episodes):
            self.csv["eval"].write({
                "step": step, "update": update, "hours": hours, "episode": number,
                "return": f"{score:.6g}", "length": length})
        scores = [score for score, _ in episodes]
        self.tensorboard.add_scalar("eval/return_mean", np.mean(scores), step)
        self.tensorboard.add_scalar("eval/return_std", np.std(scores), step)

    def pictures(self, step, pictures):
        """Pictures by name; each is a batch of images (N, C, H, W) in bytes, eight in a row."""
        for name, images in pictures.items():
            self.tensorboard.add_images(name, images, step)

    def close(self):
        for file in self.csv.values():
            file.file.close()
        self.tensorboard.close()
        if "wandb" in sys.modules:
            sys.modules["wandb"].finish()


def start_wandb(run_dir, args):
    """A Weights & Biases run that copies TensorBoard; its id stays in the folder for --resume."""
    import wandb

    id_file = run_dir / "wandb_id.txt"
    if not id_file.exists():
        write_atomically(id_file, os.urandom(4).hex().encode())
    try:
        wandb.init(project=args.wandb_project, entity=args.wandb_entity, group=args.wandb_group,
                   name=run_dir.name, id=id_file.read_text(), resume="allow", dir=run_dir,
                   config=dataclasses.asdict(args), sync_tensorboard=True, save_code=True)
    except wandb.errors.Error as error:
        raise UsageError(f"Weights & Biases refused ({error}): `wandb login` or WANDB_MODE=offline "
                         "may help; repeat the command with --resume") from error


class Progress:
    """Where a run is: a live line on a terminal, elsewhere a plain one every half minute."""

    FORMAT = "{desc}{percentage:3.0f}% {n:,}/{total:,}{postfix}"

    def __init__(self, total, step):
        self.live = sys.stdout.isatty()
        self.every = 0.5 if self.live else 30.0
        self.shown = time.time()
        self.bar = tqdm.tqdm(total=total, initial=step, bar_format=self.FORMAT, leave=False,
                             dynamic_ncols=True, file=sys.stdout if self.live else io.StringIO())

    def show(self, step, update, values):
        """`values` may live on the device: they are read only when they are shown."""
        if time.time() - self.shown < self.every:
            return
        if update > 0:  # random steps say nothing about how long the updates will take
            self.bar.bar_format = self.FORMAT + "  ETA {remaining}"
        known = [f"{name} {float(x):.4g}" for name, x in values.items() if x is not None]
        self.bar.set_postfix_str("  ".join([f"update {update:,}", *known]), refresh=False)
        self.bar.update(step - self.bar.n)
        self.refresh()

    def evaluation_of(self, total, stop):
        """A function that shows how many episodes are done and says whether to go on."""
        def keep_going(done):
            if time.time() - self.shown >= self.every:
                self.bar.set_description_str(f"evaluating {done}/{total}  ", refresh=False)
                self.refresh()
                self.bar.set_description_str(refresh=False)
            return stop.signal is None
        return keep_going

    def refresh(self):
        self.shown = time.time()
        self.bar.refresh() if self.live else print(self.bar, flush=True)

    def say(self, text):
        """Print a line without tearing the live one."""
        self.bar.clear()
        print(text, flush=True)


def due(step, every, stride=1):
    """Whether this step is the first at or after a multiple of `every` (0: never)."""
    return every > 0 and step % every < stride


def mean_std(episodes):
    scores = [score for score, _ in episodes]
    return f"{np.mean(scores):.1f} ± {np.std(scores):.1f} over {len(scores)} episodes"


def print_plan(args, run_dir, device, replay, resolved, updates, images_per_update, encode):
    """What this run will do and where, before anything slow begins; on a CPU, how long it takes.

    `encode` encodes eight observations; nearly all of an update's time goes into the encoder.
    """
    print(f"{args.env_id}, seed {args.seed}, preset {args.preset} -> {run_dir}\n"
          f"device {device}, MUJOCO_GL={os.environ.get('MUJOCO_GL', 'unset')}, replay "
          f"{replay_bytes(replay) / 1e9:.2f} GB on {replay.device}\n"
          f"resolved: {' '.join(f'{name}={getattr(args, name)}' for name in resolved)}\n"
          f"to do: {args.total_timesteps:,} steps, {updates:,} updates", flush=True)
    if device.type == "cpu":
        encode()  # the first time also sets things up
        began = time.time()
        for _ in range(4):
            encode()
        hours = updates * images_per_update * (time.time() - began) / 4 / 8 / 3600
        text = f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.0f} minutes"
        advice = "; for a CPU: --preset laptop" if args.preset != "laptop" and hours > 5 else ""
        print(f"a rough guess from {images_per_update:,.0f} encoder passes an update on this CPU: "
              f"{text}{advice}", flush=True)


def print_end(args, run_dir, stop):
    """What to type next."""
    again = shlex.join(["python", *sys.argv]) + ("" if args.resume else " --resume")
    watch = (f"python {sys.argv[0]} --eval-only --checkpoint {run_dir / AGENT_FILE}\n"
             f"  tensorboard --logdir {args.run_root}")
    print(f"stopped; to go on: {again}" if stop.signal else
          f"finished: {run_dir} has the logs and the agent; to evaluate and film it, to see its "
          f"curves:\n  {watch}", flush=True)


def heat_map(values, row_label, column_label, cell=16):
    """A square matrix as a picture with numbered axes: (1, 1, H, W) in bytes."""
    from PIL import Image, ImageDraw

    margin, side = 32, cell * len(values)
    heat = 255 * (values - values.min()) / (values.max() - values.min()).clamp(min=1e-6)
    picture = Image.new("L", (margin + side, margin + side), 255)
    picture.paste(Image.fromarray(heat.byte().cpu().numpy()).resize((side, side), 0), (margin,) * 2)
    draw = ImageDraw.Draw(picture)
    draw.text((2, 2), f"{row_label} down, {column_label} across")
    for number in range(0, len(values), 5):
        draw.text((margin + cell * number, margin - 14), str(number))
        draw.text((margin - 18, margin + cell * number), str(number))
    return torch.from_numpy(np.array(picture))[None, None]


def write_video(path, frames, fps):
    """An mp4 of RGB frames (T, H, W, 3)."""
    import imageio

    path.parent.mkdir(exist_ok=True)
    imageio.mimwrite(path, np.asarray(frames), fps=fps, macro_block_size=2)


def published_scores(table, task):
    """The paper's scores of a task, where the repository's copy of its tables is at hand."""
    path = Path(__file__).parent / "benchmark" / "paper_scores.json"
    return json.loads(path.read_text())[table].get(task, {}) if path.exists() else {}
