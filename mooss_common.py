"""Small helpers of both MOOSS scripts: command line, devices, OpenGL, run folder with checkpoints,
signals, logs. Nothing here teaches anything about the method.
"""

import argparse
import contextlib
import csv
import ctypes
import dataclasses
import difflib
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
import subprocess
import sys
import threading
import time
import timeit
import typing
import zlib
from pathlib import Path

import numpy as np
import torch
import tqdm
import tyro

CHECKPOINT_FORMAT = 5
CHECKPOINT_NAMES = ("checkpoint.pt", "checkpoint_previous.pt")  # to go on with
AGENT_FILE = "agent.pt"  # to use
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
def parse_args(args_class, fill_presets, argv=None):
    """The command line as Args; --help has groups as in the source and the presets' values."""
    types = {field.name: field.type for field in dataclasses.fields(args_class)}
    first = argparse.ArgumentParser(usage="see --help", add_help=False, allow_abbrev=False)
    first.add_argument("--env-id", "--env_id", default=args_class.env_id)
    presets = typing.get_args(types["preset"])
    first.add_argument("--preset", choices=presets, default=args_class.preset)
    defaults = fill_presets(args_class(**vars(first.parse_known_args(argv)[0])))

    parts = re.split(r"\n\n    # (.+)\n\n", inspect.getsource(args_class))
    # A flag's help is the comment beside it, or the one above it.
    a_flag = re.compile(r"(?:^    # (.+)\n)?^    (\w+): [^#\n]*(?:# (.+))?$", re.M)
    groups = []
    for title, part in zip(["run", *parts[1::2]], parts[::2]):
        group = dataclasses.make_dataclass(title.replace(" ", "_"), [
            (name, typing.Annotated[types[name], tyro.conf.arg(help=above or beside)],
             getattr(defaults, name)) for above, name, beside in a_flag.findall(part)])
        groups.append((group.__name__, group, dataclasses.field(default_factory=group)))
    flags = tyro.conf.OmitArgPrefixes[dataclasses.make_dataclass("Flags", groups)]
    typed = vars(tyro.cli(flags, args=argv, description=inspect.getdoc(args_class)))
    return args_class(**{name: x for group in typed.values() for name, x in vars(group).items()})


class LastingOutput:
    """A stream that may break (`| head -1`) or lack a letter: a run has its logs in files."""

    def __init__(self, stream):
        self.stream = stream or open(os.devnull, "w")
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
    threading.excepthook = lambda _: None  # TensorBoard's thread hands its errors on to the run
    with (contextlib.redirect_stdout(LastingOutput(sys.stdout)),
          contextlib.redirect_stderr(LastingOutput(sys.stderr))):
        try:
            sys.exit(function())
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
        except UsageError as error:
            sentence = error
        except OSError as error:
            sentence = (f"cannot use {error.filename or 'a file'} ({error.strerror or error}): "
                        "mend it and repeat the command (of a run with --resume)")
        except (MemoryError, RuntimeError) as error:
            known = ("MemoryError|(out of|allocate|enough) memory|could not create a primitive|"
                     "can't start new thread")
            if not re.search(known, repr(error)):
                raise
            sentence = "out of memory: choose smaller sizes, such as those of --preset laptop"
        print(f"error: {sentence}", file=sys.stderr)
        sys.exit(2)


def flag(name):
    return "--" + name.replace("_", "-")


def check_ranges(args, ranges):
    """All numbers are finite, and the named flags lie in their ranges."""
    for name, value in vars(args).items():
        numbers = value if isinstance(value, (tuple, list)) else (value,)
        finite = all(math.isfinite(x) for x in numbers if isinstance(x, float))
        require(finite, f"{flag(name)} {value} is not a finite number")
    for names, (low, high) in ranges.items():
        for name in names.split():
            value = getattr(args, name)
            require(low <= value <= high, f"{flag(name)} {value} is out of range: {low} to {high}")


def check_divides(args, **parts):
    """Each flag divides the one it is given for: `whole="part"`."""
    for whole, part in parts.items():
        a, b = getattr(args, whole), getattr(args, part)
        require(b > 0 and a % b == 0, f"{flag(part)} {b} does not divide {flag(whole)} {a}")


def check_names(args):
    """What becomes part of a folder's name must not lead out of the run root."""
    plain = args.run_root.encode(errors="replace").decode() == args.run_root
    require(plain, f"--run-root {args.run_root!r} has letters that this locale cannot write")
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
    known = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    full_name = {"auto": known[:2][-1], "cuda": "cuda:0"}.get(name, name)
    require(full_name in known, f"--device {name} is none of auto, {', '.join(known)}")
    return torch.device(full_name)


def configure_torch(seed, device, deterministic):
    """Seed torch and choose speed (cuDNN's autotuning) or determinism, in one place."""
    torch.manual_seed(seed)  # nothing here uses numpy's or Python's global generators
    with contextlib.suppress(OSError, AttributeError):
        # glibc shall keep large blocks that are freed (M_MMAP_MAX = -4, M_TRIM_THRESHOLD = -1): to
        # get fresh ones costs a seventh of an update.
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)
        libc.mallopt(-1, 2**31 - 1)
    torch.backends.cudnn.benchmark = device.type == "cuda" and not deterministic
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what determinism needs
    torch.use_deterministic_algorithms(deterministic, warn_only=True)


def upload(tensors, device):
    """Tensors on the device; to a GPU through pinned memory, so that nobody waits.

    The way back waits: the CPU may read at once what it gets.
    """
    if not isinstance(tensors, torch.Tensor):
        return [upload(tensor, device) for tensor in tensors]
    if tensors.device.type == "cpu" and device.type == "cuda":
        tensors = tensors.pin_memory()
    return tensors.to(device, non_blocking=device.type == "cuda")


def compiled(function):
    """torch.compile for fixed shapes; where it fails, one line says so and it goes on without."""
    torch._dynamo.config.trace_autograd_ops = True  # so that a backward pass is part of the graph
    fast = torch.compile(function, dynamic=False)

    def call(*inputs):
        nonlocal fast
        try:
            return fast(*inputs)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = " ".join(str(error).split("\n\n")[0].split())
            print(f"--compile does not work here, the run goes on without it: {reason[:300]}",
                  file=sys.stderr)
            fast = function
            return function(*inputs)

    return call


def check_observation(obs, shape):
    if tuple(obs.shape[-4:]) != shape or obs.dim() > 5 or obs.dtype != torch.uint8:
        raise ValueError(f"act takes an observation {shape} or many {('N', *shape)} in bytes "
                         f"(uint8), not {tuple(obs.shape)} in {obs.dtype}")


def require_finite(agent, step, run_dir):
    """Stop a run whose losses or weights are not all finite, before anything is saved over."""
    values = {name: x for name, x in agent.metrics.items() if name.startswith("losses/")}
    values |= agent.state_dict()
    bad = [name for name, x in values.items() if not torch.as_tensor(x).isfinite().all()]
    require(not bad, f"{', '.join(bad[:3])} became infinite or not a number by step {step:,}; the "
            f"last good checkpoint, if there is one, is {run_dir / CHECKPOINT_NAMES[0]}")


def replay_bytes(replay):
    return sum(getattr(replay, name).nbytes for name in replay.columns)


def place_replay(choice, device, replay_class, *shape):
    """Build the replay where it fits. auto: on the GPU if that leaves half of its free memory."""
    on_cuda = device.type == "cuda"
    require(choice != "cuda" or on_cuda, "--replay-device cuda needs --device cuda")
    memory = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
    free = {"cpu": 1024 * int(memory[1])}
    if on_cuda:
        free["cuda"] = torch.cuda.mem_get_info(device)[0]
    size = replay_bytes(replay_class(*shape, torch.device("meta")))
    if choice == "auto":
        choice = "cuda" if size < free.get("cuda", 0) / 2 else "cpu"
    require(size < free[choice], f"the replay needs {size / 1e9:.2f} GB but only "
            f"{free[choice] / 1e9:.2f} GB are free on {choice}: choose a smaller --buffer-size")
    return replay_class(*shape, device if choice == "cuda" else torch.device("cpu"))


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
query = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(address)
for index, egl_device in enumerate(egl_ext.eglQueryDevicesEXT()):
    number = ctypes.c_ssize_t(-1)
    if query(egl_device, 0x323A, ctypes.byref(number)) and number.value == int(sys.argv[1]):
        print(index)
"""


def probe_gl(code, *words, **setting):
    """What a program in a process of its own prints; None if it fails or hangs."""
    with contextlib.suppress(subprocess.SubprocessError):
        return subprocess.run(
            [sys.executable, "-c", code, *words], env={**os.environ, **setting}, timeout=60,
            check=True, capture_output=True, text=True).stdout.strip()


@functools.cache
def use_headless_gl(device):
    """Set MUJOCO_GL, which dm_control reads on import, to a backend that really renders a frame."""
    asked = os.environ.get("MUJOCO_GL") or "egl osmesa glfw"
    settings = [{"MUJOCO_GL": name} for name in asked.split()]
    if (device.type == "cuda" and asked.startswith("egl")
            and "MUJOCO_EGL_DEVICE_ID" not in os.environ):
        index = probe_gl(EGL_PROBE, str(device.index), MUJOCO_GL="egl")
        if index:  # render on the GPU that trains
            settings.insert(0, {"MUJOCO_GL": "egl", "MUJOCO_EGL_DEVICE_ID": index})
    for setting in settings:
        if probe_gl(GL_PROBE, **setting) is not None:
            os.environ.update(setting)
            return setting["MUJOCO_GL"]
    raise UsageError(f"MUJOCO_GL={asked} cannot render here: unset it, or install EGL (Debian, "
                     "Ubuntu: apt-get install libegl1 libgl1-mesa-dri)")


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
        cpu = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
        hardware = f"{cpu[1] if cpu else platform.machine()}, {torch.get_num_threads()} threads"
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {"command": shlex.join(["python", *sys.argv]), "commit": git("rev-parse", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "*.py")),  # a copied script too
            "hardware": hardware, "python": platform.python_version(), **versions}


class RunFolder:
    """`runs/{env_id}__{exp_name}__s{seed}/`: who may write to it, and its checkpoints.

    `may_change` names flags of the script that may differ at a resume. Of the last two checkpoints
    one is always whole. Complete rows of a replay never change: each checkpoint adds a piece, a
    file with the rows since the last one.
    """

    def __init__(self, args, script, may_change=()):
        self.args = args
        self.script = Path(script)
        self.may_change = {*FREE_TO_CHANGE, *may_change}
        name = f"{args.env_id.replace('/', '-')}__{args.exp_name}__s{args.seed}"
        self.path = Path(args.run_root) / name
        # Those that the newest checkpoint needs: [first row, last row + 1, size, checksum] of each.
        self.pieces = []

    def described(self):
        """All that decides what a run computes: its flags, its script, and the script's source."""
        flags = json.loads(json.dumps(dataclasses.asdict(self.args)))
        return {**flags, "script": self.script.stem, "source": self.source()}

    def source(self):
        """A fingerprint of the script's source."""
        return f"{zlib.crc32(self.script.read_bytes()):08x}"

    def check(self):
        """Refuse in the first second, and without writing, a folder that is not ours to write."""
        if not self.path.exists():
            return
        require(self.args.resume, f"{self.path} exists: add --resume or choose another --exp-name")
        saved = self.path / "args.json"
        # What a run leaves that is killed in its first moment.
        ours = {file.name for file in self.path.iterdir()} <= {".lock", "args.json.new"}
        require(ours or saved.is_file(), f"{self.path} holds no run of ours")
        if saved.is_file():
            with reading(saved):
                before = json.loads(saved.read_text())
                self.refuse_other_args(self.path, before)
            if before.get("source") != self.source():
                print(f"{self.script.name} has changed since {self.path} was begun",
                      file=sys.stderr)

    def refuse_other_args(self, path, before):
        """A run continues with the flags and the script it began with."""
        now = self.described()
        before = json.loads(json.dumps(before))  # as in args.json: tuples become lists
        differs = [f"{name} was {before.get(name)!r}, is {now.get(name)!r}"
                   for name in {**before, **now}
                   if name not in self.may_change and now.get(name) != before.get(name)]
        require(not differs, f"{path} was made with other settings ({'; '.join(differs)})")

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

    def piece_path(self, piece):
        return self.path / "replay" / "{:09d}-{:09d}.pt".format(*piece)

    def save(self, agent, replay, counters, logger):
        require_finite(agent, counters.step, self.path)
        (self.path / "replay").mkdir(exist_ok=True)
        before = self.pieces
        self.pieces = [piece for piece in before if piece[1] > replay.oldest_row]
        begin = self.pieces[-1][1] if self.pieces else replay.oldest_row
        if begin < replay.newest_row:  # which is not complete: the replay's own state has it
            path = self.piece_path([begin, replay.newest_row])
            slots = torch.arange(begin, replay.newest_row) % replay.capacity
            rows = {name: getattr(replay, name)[slots].cpu() for name in replay.columns}
            write_atomically(path, rows)
            self.pieces.append([begin, replay.newest_row, *file_state(path)])

        weights = agent.state_dict()
        to_use = {
            "format": CHECKPOINT_FORMAT, "script": self.script.stem, "source": self.source(),
            "step": counters.step, "args": dataclasses.asdict(agent.args),
            "agent_shape": agent.shape,
            "agent": {name: x for name, x in weights.items() if not name.startswith(agent.unused)}}
        on_cuda = agent.device.type == "cuda"
        to_go_on = {
            **to_use, "agent": weights, "counters": dataclasses.asdict(counters),
            "metrics": {name: float(value) for name, value in agent.metrics.items()},
            "optimizers": {name: x.state_dict() for name, x in agent.optimizers.items()},
            "replay": replay.state_dict(), "pieces": self.pieces, "logs": logger.state(),
            "torch_rng": torch.get_rng_state(),
            "cuda_rng": [torch.cuda.get_rng_state(agent.device)] if on_cuda else []}
        newest, previous = (self.path / name for name in CHECKPOINT_NAMES)
        if newest.exists():
            os.replace(newest, previous)
        write_atomically(newest, to_go_on)
        write_atomically(self.path / AGENT_FILE, to_use)
        needed = [self.piece_path(piece) for piece in before + self.pieces]
        for file in (self.path / "replay").iterdir():
            if file not in needed:
                file.unlink()

    def restore(self, agent, replay, counters):
        """Load the newest whole checkpoint: its counters and logs; those given without any."""
        paths = [self.path / name for name in CHECKPOINT_NAMES]
        paths = [path for path in paths if path.exists()]
        for path in paths:
            try:
                state = read_checkpoint(path, self.script)
                with reading(path):
                    self.refuse_other_args(path, {**state["args"], "script": self.script.stem})
                    self.load(state, agent, replay)
                    counters = dataclasses.replace(counters, **state["counters"])
            except (UsageError, OSError) as error:
                print(f"skipping a checkpoint: {error}", file=sys.stderr)
                continue
            os.replace(path, paths[0])  # a damaged one must not become the previous one
            print(f"resuming {path} at step {state['step']:,}")
            return counters, state["logs"]
        require(not paths, f"no checkpoint in {self.path} is whole")
        return counters, None

    def load(self, state, agent, replay):
        self.pieces = state["pieces"]
        for piece in self.pieces:
            path = self.piece_path(piece)
            require(file_state(path) == piece[2:], f"{path} is damaged, or of another run")
            slots = torch.arange(*piece[:2]) % replay.capacity
            for name, rows in read_tensors(path).items():
                getattr(replay, name)[slots] = rows.to(replay.device)
        replay.load_state_dict(state["replay"])
        agent.load_state_dict(state["agent"])
        agent.metrics = state["metrics"]
        for name, optimizer in agent.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        torch.set_rng_state(state["torch_rng"])
        if agent.device.type == "cuda" and state["cuda_rng"]:
            torch.cuda.set_rng_state(state["cuda_rng"][0], agent.device)


def write_atomically(path, data):
    """Write beside, flush to disk, rename: a reader finds the old file or the new one, whole.

    A file of tensors ends with a checksum, which torch.load does not mind.
    """
    beside = path.with_name(path.name + ".new")
    try:
        with open(beside, "wb+") as file:
            if isinstance(data, bytes):
                file.write(data)
            else:
                torch.save(data, file)
                file.seek(0)
                file.write(checksum(file.read()))
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:  # RuntimeError: how torch.save meets a full disk
        beside.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path} (is the disk full?): the files before are whole"
                         ) from error
    os.replace(beside, path)
    folder = os.open(path.parent, os.O_RDONLY)  # the new name must reach the disk too
    os.fsync(folder)
    os.close(folder)


@contextlib.contextmanager
def reading(path):
    """Whatever a file's contents make go wrong in this block is one sentence."""
    try:
        yield
    except (EOFError, LookupError, ArithmeticError, AssertionError, AttributeError, TypeError,
            ValueError, RuntimeError, csv.Error, pickle.UnpicklingError) as error:
        raise UsageError(f"{path} is damaged, or of another version of this program "
                         f"({type(error).__name__})") from error


def checksum(content):
    return zlib.crc32(content).to_bytes(4, "big")


def read_tensors(path):
    """What `write_atomically` wrote, and nothing else; no code in it is executed."""
    content = Path(path).read_bytes()
    require(checksum(memoryview(content)[:-4]) == content[-4:],
            f"{path} is damaged, or was not written by this version of the program")
    with reading(path):
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def read_checkpoint(path, script):
    """The contents of a checkpoint file, or of `agent.pt`."""
    state = read_tensors(path)
    require(state.get("format") == CHECKPOINT_FORMAT,
            f"{path} is no checkpoint of format {CHECKPOINT_FORMAT}, which is read here")
    writer = state["script"]
    require(writer == Path(script).stem, f"{path} was written by {writer}.py: use that script")
    return state


def load_agent(path, script, args_class, agent_class, device):
    """The agent of a checkpoint file or of `agent.pt`, and its step."""
    state = read_checkpoint(path, script)
    with reading(path):
        args = args_class(**state["args"])
        agent = agent_class(args, *state["agent_shape"], torch.device(device))
        missing, _ = agent.load_state_dict(state["agent"], strict=False)
        require(all(name.startswith(agent.unused) for name in missing), f"{path} lacks {missing}")
    return agent, state["step"]


def evaluate_only(args, load_agent, evaluate, own_flags):
    """--eval-only: the saved agent on its own task, and with its own flags but for `own_flags`."""
    device = pick_device(args.device)
    configure_torch(args.seed, device, args.torch_deterministic)
    agent, step = load_agent(args.checkpoint, device)
    folder = Path(args.checkpoint).parent
    args = dataclasses.replace(agent.args, **{name: getattr(args, name) for name in own_flags})
    video = folder / "videos" / f"eval_only_{step}.mp4"
    stop = StopRequest()
    progress = Progress(args, step, stop)
    episodes = evaluate(agent, args, device, step, progress.keep_going, video)
    progress.bar.close()
    stop.close()
    if episodes is None:
        return 128 + stop.signal
    append_episodes(folder / "eval_only.csv", episodes, step=step)
    print(f"step {step:,}: return {mean_std(episodes)}; see {folder / 'eval_only.csv'}, {video}")
    return 0


# ------------------------------------------------------------------------------- signals, progress
class StopRequest:
    """Signals ask the loop to checkpoint and leave; a second SIGINT leaves at once."""

    def __init__(self):
        self.signal = None
        self.handlers = {}
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
            number = signal.Signals[name]
            if signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP is under nohup
                self.handlers[number] = signal.signal(number, self.ask)

    def ask(self, number, frame):
        if number == signal.SIGINT and self.signal is not None:
            os._exit(128 + number)
        self.signal = number
        with contextlib.suppress(OSError):
            os.write(2, b"\nstopping: writing a checkpoint; Ctrl-C again to leave without\n")

    def close(self):
        for number, handler in self.handlers.items():
            signal.signal(number, handler)


class Progress:
    """Where a run is: a live line on a terminal, elsewhere a plain one every half minute."""

    FORMAT = "{desc}{percentage:3.0f}% {n:,}/{total:,}  ETA {remaining}{postfix}"

    def __init__(self, args, step, stop):
        self.stop = stop
        self.episodes = args.eval_episodes
        self.live = sys.stdout.isatty()
        total = args.total_timesteps
        self.bar = tqdm.tqdm(
            total=total, initial=min(step, total), bar_format=self.FORMAT, leave=False, miniters=0,
            mininterval=0.5 if self.live else 30, dynamic_ncols=True, smoothing=0,
            file=sys.stdout if self.live else io.StringIO())

    def draw(self):
        self.bar.refresh() if self.live else print(self.bar, flush=True)

    def show(self, step, update, values):
        """`values` may live on the device: they are read only when they are shown."""
        if update == 0:  # random steps say nothing about how long the updates will take
            self.bar.initial = step
            self.bar.start_t = time.time()
        if not self.bar.update(min(step, self.bar.total) - self.bar.n):
            return  # too soon after the last time
        known = [f"{name} {float(x):.4g}" for name, x in values.items() if x is not None]
        self.bar.set_postfix_str("  ".join([f"update {update:,}", *known]), refresh=False)
        self.draw()

    def keep_going(self, done):
        """Show how many episodes of an evaluation are done; whether no signal stops it."""
        if self.bar.update(0):
            self.bar.set_description_str(f"evaluating {done}/{self.episodes}  ", refresh=False)
            self.draw()
            self.bar.set_description_str(refresh=False)
        return self.stop.signal is None


def due(step, every, stride=1):
    """Whether this step is the first at or after a multiple of `every` (0: never)."""
    return every > 0 and step % every < stride


def print_plan(args, run_dir, agent, replay, resolved, updates):
    """What this run will do and where, before anything slow begins; on a CPU, how long it takes."""
    print(f"{args.env_id}, seed {args.seed}, preset {args.preset} -> {run_dir}\n"
          f"device {agent.device}, MUJOCO_GL={os.environ.get('MUJOCO_GL', 'unset')}, replay "
          f"{replay_bytes(replay) / 1e9:.2f} GB on {replay.device}\n"
          f"resolved: {' '.join(f'{name}={getattr(args, name)}' for name in resolved)}\n"
          f"to do: {updates:,} updates, up to step {args.total_timesteps:,}", flush=True)
    if agent.device.type == "cpu":
        obs = np.zeros((8, *agent.obs_shape), np.uint8)
        with torch.random.fork_rng([]):  # the run must not depend on it
            agent.act(obs)  # the first time also sets things up
            seconds = timeit.timeit(lambda: agent.act(obs), number=4) / (4 * len(obs))
        hours = seconds * updates * agent.images_per_update() / 3600
        guess = f"{hours:.1f} hours" if hours > 1 else f"{60 * hours:.1f} minutes"
        advice = "" if args.preset == "laptop" else "; --preset laptop is made for a CPU"
        print(f"a rough guess: {guess} on this CPU{advice}", flush=True)


def print_end(args, run_dir, stop):
    """What to type next."""
    if stop.signal:
        again = [] if args.resume else ["--resume"]
        print("stopped; to go on:", shlex.join(["python", *sys.argv, *again]))
    else:
        print(f"finished: {run_dir} has the logs and the agent; to film it, to see its curves:\n"
              f"  python {sys.argv[0]} --eval-only --checkpoint {run_dir / AGENT_FILE}\n"
              f"  tensorboard --logdir {args.run_root}")


# -------------------------------------------------------------------------------------------- logs
def append_row(path, row):
    """Add a row to a CSV file; the keys of the first one are the columns."""
    with open(path, "a+", newline="", errors="replace") as file:
        file.seek(0)
        with reading(path):
            columns = next(csv.reader(file), list(row))
        unknown = ", ".join(sorted(row.keys() - set(columns)))
        require(not unknown, f"{unknown} is not a column of {path}: log it from the first row on")
        writer = csv.DictWriter(file, columns)
        if file.seek(0, os.SEEK_END) == 0:
            writer.writeheader()
        writer.writerow(row)


def append_episodes(path, episodes, **where):
    for number, (score, length) in enumerate(episodes):
        row = {"episode": number, "return": f"{score:.6g}", "length": length}
        append_row(path, {**where, **row})


def file_state(path, size=-1):
    """Size and checksum of a file's beginning, safe on the disk: a checkpoint relies on it."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        data = file.read(size)
    return [len(data), zlib.crc32(data)]


class RunLogger:
    """train.csv, eval.csv, TensorBoard and, with --track, Weights & Biases behind one call each."""

    def __init__(self, run_dir, args, step, saved):
        from torch.utils.tensorboard import SummaryWriter  # slow, and --help does not need it

        nothing = {"hours": 0.0, "episodic_return": "", "train.csv": [0, 0], "eval.csv": [0, 0]}
        saved = saved or nothing
        self.began = time.time() - 3600 * saved["hours"]
        self.episodic_return = saved["episodic_return"]
        self.files = [run_dir / "train.csv", run_dir / "eval.csv"]
        for path in self.files:  # what was logged after the checkpoint will be logged again
            path.touch()
            same = file_state(path, saved[path.name][0]) == saved[path.name]
            require(same, f"{path} is not as the checkpoint left it: put its old contents back, or "
                    "begin anew with another --exp-name")
            os.truncate(path, saved[path.name][0])
        if args.track:
            start_wandb(run_dir, args)  # before the writer, which it listens to
        self.tensorboard = SummaryWriter(run_dir, purge_step=step + 1 if step else 0)
        rows = [f"| {flag(name)} | {value} |" for name, value in vars(args).items()]
        self.tensorboard.add_text("flags", "\n".join(["| flag | value |", "|---|---|", *rows]))

    def hours(self):
        return (time.time() - self.began) / 3600

    def state(self):
        files = {path.name: file_state(path) for path in self.files}
        return {"hours": self.hours(), "episodic_return": self.episodic_return, **files}

    def episode(self, step, score):
        """The return of a training episode; the next row of train.csv will carry it."""
        self.tensorboard.add_scalar("charts/episodic_return", score, step)
        self.episodic_return = f"{score:.6g}"

    def train(self, step, update, metrics):
        append_row(self.files[0], {
            "step": step, "update": update, "hours": f"{self.hours():.5f}",
            "charts/episodic_return": self.episodic_return,
            **{name: f"{float(value):.6g}" for name, value in metrics.items()}})
        self.episodic_return = ""
        # The speed is only here: the file shall not depend on when it was written.
        for name, value in {**metrics, "charts/SPS": step / self.hours() / 3600}.items():
            self.tensorboard.add_scalar(name, float(value), step)

    def evaluation(self, step, update, episodes):
        hours = f"{self.hours():.5f}"
        append_episodes(self.files[1], episodes, step=step, update=update, hours=hours)
        scores = [score for score, _ in episodes]
        self.tensorboard.add_scalar("eval/return_mean", np.mean(scores), step)
        self.tensorboard.add_scalar("eval/return_std", np.std(scores), step)

    def pictures(self, step, pictures):
        """Pictures by name; each is a batch of images (N, C, H, W) in bytes, eight in a row."""
        for name, images in pictures.items():
            self.tensorboard.add_images(name, images, step)

    def close(self):
        self.tensorboard.close()
        if "wandb" in sys.modules:
            sys.modules["wandb"].finish()


def start_wandb(run_dir, args):
    """A Weights & Biases run that copies TensorBoard; its id stays in the folder for --resume."""
    import wandb

    id_file = run_dir / "wandb_id.txt"
    if not id_file.exists():
        id_file.write_text(os.urandom(4).hex())
    try:
        wandb.init(project=args.wandb_project, entity=args.wandb_entity, group=args.wandb_group,
                   name=run_dir.name, id=id_file.read_text(), resume="allow",
                   config=vars(args), sync_tensorboard=True, save_code=True)
    except wandb.errors.Error as error:
        raise UsageError(f"Weights & Biases refused ({error}): `wandb login` or WANDB_MODE=offline "
                         "may help; repeat the command with --resume") from error


def mean_std(episodes):
    scores = [score for score, _ in episodes]
    return f"{np.mean(scores):.1f} ± {np.std(scores):.1f} over {len(scores)} episodes"


def heat_map(values, cell=16, margin=8):
    """A square matrix as a picture; axes above and left mark every fifth cell: (1, 1, H, W)."""
    heat = 255 * (values - values.min()) / (values.max() - values.min()).clamp(min=1e-6)
    cells = torch.kron(heat, torch.ones(cell, cell, device=heat.device))
    picture = torch.nn.functional.pad(cells, (margin, 0, margin, 0))
    picture[:margin, margin:].unflatten(1, (-1, cell))[:, ::5] = 255
    picture[margin:, :margin].unflatten(0, (-1, cell))[::5] = 255
    return picture.byte()[None, None]


def write_video(path, frames, fps, enlarge=1):
    """An mp4 of RGB frames (H, W, 3)."""
    import imageio

    path.parent.mkdir(exist_ok=True)
    with imageio.get_writer(path, fps=fps, macro_block_size=2) as video:
        for frame in frames:
            video.append_data(frame.repeat(enlarge, 0).repeat(enlarge, 1))


def published_scores(table, task):
    """The paper's scores of a task, where the repository's copy of its tables is at hand."""
    path = Path(__file__).parent / "benchmark" / "paper_scores.json"
    return json.loads(path.read_text())[table].get(task, {}) if path.exists() else {}
