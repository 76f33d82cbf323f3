"""Small helpers that both MOOSS scripts share: command line, devices, OpenGL, run folder, logs, checkpoints, signals.

Nothing in this file teaches anything about the method; read `sac_mooss_dmc.py` or `rainbow_mooss_atari.py` for that.
"""

import contextlib
import dataclasses
import datetime
import difflib
import errno
import fcntl
import functools
import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import uuid
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
import tyro

CHECKPOINT_FORMAT = 2
# Flags that may change between a run and its continuation: they touch where and how it runs, not what it computes.
FREE_TO_CHANGE = {"resume", "run_root", "checkpoint_every", "device", "replay_device", "capture_video", "track",
                  "wandb_project", "wandb_entity", "wandb_group", "eval_only", "checkpoint"}


class UsageError(Exception):
    """An error a person can cause and mend. Its message is one sentence; the process ends with exit code 2."""


# ---------------------------------------------------------------------------------------------- command line
def parse_args(args_class, argv):
    """The command line as Args, by tyro."""
    argv = [word.replace("_", "-") if re.fullmatch(r"--[a-z0-9_]+", word) else word for word in argv]
    for field in dataclasses.fields(args_class):
        if field.type == bool | None:  # tyro wants a value here; people type --share-mask and --no-share-mask
            flag = field.name.replace("_", "-")
            for typed, value in ((f"--{flag}", "True"), (f"--no-{flag}", "False")):
                if typed in argv and argv[argv.index(typed) + 1:][:1] not in (["True"], ["False"], ["None"]):
                    argv[argv.index(typed):argv.index(typed) + 1] = [f"--{flag}", value]
    return tyro.cli(args_class, args=argv)


def run_cli(args_class, main, argv=None):
    """Parse the command line, run `main(args)` and exit with its code."""
    exit_with(lambda: main(parse_args(args_class, sys.argv[1:] if argv is None else argv)))


def exit_with(function):
    """Exit with the code that `function()` returns; what a person can mend becomes one sentence and code 2."""
    try:
        sys.exit(function())
    except UsageError as error:
        sentence = error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        sentence = f"cannot write ({error.strerror}): make room, then add --resume to go on from the last checkpoint"
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search("(out of|allocate|enough) memory", str(error)):
            raise
        sentence = "out of memory: choose smaller sizes, such as those of --preset laptop"
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)


def require(condition, sentence):
    if not condition:
        raise UsageError(sentence)


def check_numbers(args, **ranges):
    """An int is at least 1 and a float in [0, 1], unless `name=(low, high)` says else; NaN is in no range."""
    for name, value in dataclasses.asdict(args).items():
        kind = type(value)
        if kind in (int, float):
            low, high = ranges.get(name, (1, math.inf) if kind is int else (0.0, 1.0))
            limits = f"at least {low}" if high == math.inf else f"between {low} and {high}"
            require(low <= value <= high and math.isfinite(value),
                    f"--{name.replace('_', '-')} {value} is out of range: it must be {limits}")


def require_known(flag, name, names):
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.0)
        raise UsageError(f"{flag} {name} is unknown: the nearest names are {', '.join(near)}")


def require_name(flag, name):
    """A name that becomes part of a folder's name must not lead out of it."""
    require(re.fullmatch(r"[A-Za-z0-9_.+=-]+", name) and set(name) != {"."} and len(name) <= 100,
            f"{flag} {name!r} cannot be part of a folder's name: use letters, digits and _ . + = -")


# ---------------------------------------------------------------------------------------------- seeds and devices
def derive_seed(*parts):
    """A 32-bit seed from several parts (numbers or words), so that streams never overlap by arithmetic."""
    numbers = [part if isinstance(part, int) else zlib.crc32(part.encode()) for part in parts]
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def pick_device(name):
    """`auto`, `cpu`, `cuda` or `cuda:N`, checked; everything else in a script just uses the device it gets."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    require(re.fullmatch(r"cpu|cuda(:\d+)?", name), f"--device {name} is unknown: use auto, cpu, cuda or cuda:N")
    index, count = int(name[5:] or 0), torch.cuda.device_count()
    require(name == "cpu" or index < count, f"--device {name} does not exist: torch sees {count} GPUs, counted from 0")
    return torch.device("cpu") if name == "cpu" else torch.device("cuda", index)


def configure_torch(seed, device, deterministic):
    """Seed torch and choose speed (TF32, cuDNN autotuning) or determinism, in one place."""
    torch.manual_seed(seed)  # nothing here uses numpy's or Python's global generators
    torch.backends.cudnn.allow_tf32 = True  # in the convolutions, which cost most; products stay in full fp32
    torch.backends.cudnn.benchmark = device.type == "cuda" and not deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic, warn_only=True)


def flag_non_finite(flags, metrics):
    """Note on the device, without waiting for it, which losses and gradient norms were ever not finite."""
    for name, value in metrics.items():
        if name.startswith("losses/") or name.endswith("grad_norm"):
            flags[name] = flags.get(name, False) | ~torch.isfinite(torch.as_tensor(value))


def require_finite(flags, step, run_dir):
    """Stop a run whose losses were not all finite, before anything is logged or saved over."""
    bad, last = [name for name, flag in flags.items() if flag], run_dir / "checkpoint.pt"
    require(not bad, f"{', '.join(bad[:3])} became infinite or not a number by step {step:,}; "
            + (f"the last good checkpoint is {last}" if last.exists() else "there is no checkpoint yet"))


def maybe_compile(function, enabled, device):
    """torch.compile for fixed shapes; on CUDA `reduce-overhead` brings CUDA graphs, whose outputs must be copied."""
    if not enabled:
        return function
    on_cuda = device.type == "cuda"
    compiled = torch.compile(function, dynamic=False, mode="reduce-overhead" if on_cuda else None)

    def call(*inputs):
        nonlocal compiled
        if compiled is not None:
            try:
                outputs = compiled(*inputs)
                return tuple(output.clone() for output in outputs) if on_cuda else outputs
            except torch._dynamo.exc.TorchDynamoException as error:
                print(f"--compile does not work here ({error}): going on without it", file=sys.stderr)
                compiled = None
        return function(*inputs)

    return call


def free_memory(device):
    """Bytes that can still be allocated on the device; for the CPU a container's limit counts too."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError):
        free = 1024 * int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1])
    with contextlib.suppress(OSError, ValueError):  # ValueError: the limit is the word "max"
        group = Path("/sys/fs/cgroup", Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2].lstrip("/"))
        used = int((group / "memory.current").read_text())
        cache = int(re.search(r"inactive_file (\d+)", (group / "memory.stat").read_text())[1])
        free = min(free, int((group / "memory.max").read_text()) - used + cache)
    return free


def replay_bytes(replay):
    return sum(getattr(replay, name).nbytes for name in replay.columns)


def place_replay(choice, device, build):
    """Build the replay where it fits. auto: on the GPU if that leaves at least half of its free memory."""
    size = replay_bytes(build(device=torch.device("meta")))
    if choice == "auto":
        choice = "cuda" if device.type == "cuda" and size < free_memory(device) / 2 else "cpu"
    require(choice == "cpu" or device.type == "cuda", f"--replay-device cuda needs --device cuda, not {device}")
    home = device if choice == "cuda" else torch.device("cpu")
    free = free_memory(home)
    require(size < free, f"the replay needs {size / 1e9:.2f} GB but only {free / 1e9:.2f} GB are free on {home}: "
                         "choose a smaller --buffer-size")
    return build(device=home)


# ---------------------------------------------------------------------------------------------- OpenGL
GL_PROBE = """
from dm_control import mujoco
xml = '<mujoco><worldbody><light pos="0 0 2"/><geom size="1"/></worldbody></mujoco>'
physics = mujoco.Physics.from_xml_string(xml)
assert physics.render(16, 16).any()
"""


@functools.cache
def use_headless_gl(device):
    """Set MUJOCO_GL (dm_control reads it when imported) to a backend that really renders a frame, and return it."""
    asked = os.environ.get("MUJOCO_GL")
    settings = [{"MUJOCO_GL": name} for name in ((asked,) if asked else ("egl", "osmesa", "glfw"))]
    if device.type == "cuda" and "MUJOCO_EGL_DEVICE_ID" not in os.environ:  # render on the GPU that trains
        index = dict(enumerate(os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))).get(device.index, "")
        index = index if index.isdigit() else device.index
        egl = [setting for setting in settings if setting["MUJOCO_GL"] == "egl"]
        settings = [{**setting, "MUJOCO_EGL_DEVICE_ID": str(index)} for setting in egl] + settings
    for setting in settings:
        probe = subprocess.run([sys.executable, "-c", GL_PROBE], env={**os.environ, **setting}, capture_output=True)
        if probe.returncode == 0:
            os.environ.update(setting)
            return setting["MUJOCO_GL"]
    if asked:
        raise UsageError(f"MUJOCO_GL={asked} cannot render here: unset it, so that a working backend is looked for")
    raise UsageError("no OpenGL backend can render here: install EGL (Debian, Ubuntu: apt-get install libegl1 "
                     "libgl1-mesa-dri) or OSMesa (apt-get install libosmesa6)")


# ---------------------------------------------------------------------------------------------- run folder
class RunFolder:
    """`runs/{env_id}__{exp_name}__s{seed}/`, claimed by one process at a time."""

    def __init__(self, args):
        self.path, self.args = Path(args.run_root) / f"{args.env_id}__{args.exp_name}__s{args.seed}", args

    def check(self):
        """Refuse in the first second, and without writing, a folder that is not ours to write to."""
        if not self.path.exists():
            return
        require(self.args.resume, f"{self.path} exists: add --resume to continue it, or choose another --exp-name")
        require(self.path.is_dir(), f"{self.path} is not a folder: choose another --exp-name")
        saved = self.path / "args.json"
        if saved.is_file():
            try:
                refuse_other_args(self.path, json.loads(saved.read_text()), self.args)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UsageError(f"{saved} is damaged ({type(error).__name__})") from error
        else:
            foreign = {file.name for file in self.path.iterdir()} - {".lock", "args.json.new"}  # killed this early
            require(not foreign, f"{self.path} holds no run of ours")

    def claim(self):
        """Create and lock the folder; the lock goes with the process, so that a dead one blocks nobody."""
        try:
            self.path.mkdir(parents=True, exist_ok=self.args.resume)
            self.lock = open(self.path / ".lock", "w")
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_atomically(self.path / "args.json", json.dumps(dataclasses.asdict(self.args), indent=1).encode())
        except BlockingIOError as error:
            raise UsageError(f"another process is running in {self.path}") from error
        except OSError as error:
            raise UsageError(f"cannot write to {self.path}: {error.strerror}") from error
        return self.path


def refuse_other_args(source, saved, args):
    """A run continues with the flags it began with; the sentence names what differs."""
    saved, now = (json.loads(json.dumps(values)) for values in (saved, dataclasses.asdict(args)))
    free = FREE_TO_CHANGE | (set() if "priority_correction" in now else {"total_timesteps"})  # Atari has a schedule
    differs = [f"{name} was {saved.get(name)!r}, is {now.get(name)!r}" for name in sorted(now.keys() | saved.keys())
               if name not in free and now.get(name) != saved.get(name)]
    require(not differs, f"{source} was made with other settings ({'; '.join(differs)}): repeat the run's own flags")


def write_atomically(path, data):
    """Write beside, flush to disk, rename: a reader finds the old file or the new one, never half of one."""
    beside = path.with_name(path.name + ".new")
    try:
        with open(beside, "wb") as file:
            file.write(data) if isinstance(data, bytes) else torch.save(data, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:  # RuntimeError: how torch.save meets a full disk
        beside.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path} (is the disk full?): what was saved before is whole") from error
    os.replace(beside, path)
    folder = os.open(path.parent, os.O_RDONLY)  # the new name must reach the disk too
    os.fsync(folder)
    os.close(folder)


# ---------------------------------------------------------------------------------------------- checkpoints
def save_checkpoint(run_dir, script, args, agent, replay, logger, counters):
    """Write `checkpoint.pt`, keep the one before it, and add only the new rows of the replay to `replay/`.

    Replay rows never change once stored, so each checkpoint adds one file with the rows since the last one; files
    that neither checkpoint needs any more are removed at the end.
    """
    if replay.saved_at == (counters["step"], counters["last_eval"]):
        return
    require_finite({name: not torch.isfinite(value).all() for name, value in agent.state_dict().items()},
                   counters["step"], run_dir)
    (run_dir / "replay").mkdir(exist_ok=True)
    oldest_row = max(0, replay.rows - replay.capacity)
    pieces = [piece for piece in replay.saved_pieces if piece["end"] > oldest_row]
    begin = pieces[-1]["end"] if pieces else oldest_row
    if begin < replay.rows:
        pieces.append({"begin": begin, "end": replay.rows, "file": f"{begin:09d}-{replay.rows:09d}.pt"})
        slots = torch.arange(begin, replay.rows) % replay.capacity
        write_atomically(run_dir / "replay" / pieces[-1]["file"], {
            name: getattr(replay, name)[slots].cpu() for name in replay.columns})
    newest, fresh = run_dir / "checkpoint.pt", run_dir / "checkpoint_next.pt"
    write_atomically(fresh, {
        "format": CHECKPOINT_FORMAT, "script": script, "args": dataclasses.asdict(args), **counters,
        "agent": agent.state_dict(), "metrics": {key: float(value) for key, value in agent.metrics.items()},
        "optimizers": {name: optimizer.state_dict() for name, optimizer in agent.optimizers.items()},
        "replay": replay.state_dict(), "replay_pieces": pieces, "logger": logger.state(),
        "torch_rng": torch.get_rng_state(), "cuda_rng": torch.cuda.get_rng_state_all()})
    if newest.exists():
        os.replace(newest, run_dir / "checkpoint_previous.pt")
    os.replace(fresh, newest)
    needed = {piece["file"] for piece in pieces + replay.saved_pieces}
    replay.saved_pieces, replay.saved_at = pieces, (counters["step"], counters["last_eval"])
    for file in (run_dir / "replay").iterdir():
        if file.name not in needed:
            file.unlink()


def resume(run_dir, script, args, agent, replay):
    """Restore agent, replay and random states from the newest whole checkpoint and return it (None: there is none)."""
    candidates = [run_dir / name for name in ("checkpoint.pt", "checkpoint_next.pt", "checkpoint_previous.pt")]
    candidates = [path for path in candidates if path.exists()]
    for path in candidates:
        try:
            state = read_checkpoint(path, script)
            for piece in state["replay_pieces"]:
                slots = torch.arange(piece["begin"], piece["end"]) % replay.capacity
                for name, values in read_tensors(run_dir / "replay" / piece["file"]).items():
                    column = getattr(replay, name)
                    column[slots] = values.to(column.device)
        except UsageError as error:
            print(f"skipping a checkpoint: {error}", file=sys.stderr)
            continue
        refuse_other_args(path, state["args"], args)
        os.replace(path, run_dir / "checkpoint.pt")  # a damaged one must not become the previous one
        replay.saved_pieces, replay.saved_at = state["replay_pieces"], (state["step"], state["last_eval"])
        replay.load_state_dict(state["replay"])
        agent.load_state_dict(state["agent"])
        agent.metrics = state["metrics"]
        for name, optimizer in agent.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        torch.set_rng_state(state["torch_rng"])
        for index, cuda_rng in enumerate(state["cuda_rng"][:torch.cuda.device_count()]):
            torch.cuda.set_rng_state(cuda_rng, index)
        print(f"resuming {path} at step {state['step']:,}")
        return state
    require(not candidates, f"no checkpoint in {run_dir} is whole")
    return None


def read_checkpoint(path, script):
    """The contents of a checkpoint file, its checksums verified; nothing in it is ever executed."""
    path = Path(path)
    require(path.is_file(), f"there is no checkpoint file {path}")
    state = read_tensors(path)
    require(isinstance(state, dict) and "format" in state, f"{path} is not a checkpoint of this project")
    require(state["format"] == CHECKPOINT_FORMAT,
            f"{path} has checkpoint format {state['format']}, this version reads format {CHECKPOINT_FORMAT}")
    require(state.get("script") == script, f"{path} was written by {state.get('script')}.py: use that script")
    return state


def read_tensors(path):
    """torch.load without pickled code, after a look at the checksums: what torch saves is a zip archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        require(damaged is None, f"{path} is damaged: its part {damaged} does not match its checksum")
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, NotImplementedError, zipfile.BadZipFile, zlib.error,
            pickle.UnpicklingError) as error:
        raise UsageError(f"{path} is damaged or is not a checkpoint ({type(error).__name__})") from error


def load_agent(script, args_class, agent_class, path, device="cpu"):
    """The agent of a checkpoint file, and its step."""
    state = read_checkpoint(path, script)
    try:
        agent = agent_class(args_class(**state["args"]), *state["agent_shape"], torch.device(device))
        agent.load_state_dict(state["agent"])
    except (KeyError, TypeError, RuntimeError) as error:
        raise UsageError(f"{path} was written by another version of {script}.py ({type(error).__name__})") from error
    return agent, state["step"]


def evaluate_only(args, load, evaluate):
    """--eval-only: the saved agent on its own task; scores to eval_only.csv and a video beside the checkpoint."""
    device, folder = pick_device(args.device), Path(args.checkpoint).parent
    configure_torch(args.seed, device, args.torch_deterministic)
    agent, step = load(args.checkpoint, device)
    require(os.access(folder, os.W_OK), f"cannot write to {folder}")
    own = {name: getattr(args, name) for name in ("seed", "eval_episodes", "eval_epsilon") if hasattr(args, name)}
    args = dataclasses.replace(agent.args, **own)
    episodes = evaluate(agent, args, device, step, folder / "videos" / f"eval_only_{step}.mp4")
    path = folder / "eval_only.csv"
    table = CsvFile(path, ("step", "episode", "return", "length"), path.stat().st_size if path.exists() else 0)
    for number, (score, length) in enumerate(episodes):
        table.write({"step": step, "episode": number, "return": f"{score:.6g}", "length": length})
    table.file.close()
    print(f"step {step:,}: return {mean_std([score for score, _ in episodes])}; written to {path}")
    return 0


# ---------------------------------------------------------------------------------------------- signals
class StopRequest:
    """SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 ask the loop to checkpoint and leave with code 128 + signal number.

    A second SIGINT leaves at once.
    """

    def __init__(self):
        self.signal = None
        self._before = {number: signal.signal(number, self._ask) for number in
                        (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}

    def _ask(self, number, frame):
        if number == signal.SIGINT and self.signal is not None:
            os._exit(128 + number)
        self.signal = number

    def close(self):
        for number, handler in self._before.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------------------------------------- logs
class CsvFile:
    """Rows with fixed columns, written one by one; continued at the byte where a checkpoint left it."""

    def __init__(self, path, columns, size=0):
        self.file = open(path, "ab", buffering=0)  # no buffer that a full disk could leave behind
        self.file.truncate(size)
        self.columns = columns
        if size == 0:
            self.write(dict(zip(columns, columns)))

    def write(self, row):
        data = (",".join(str(row.get(name, "")) for name in self.columns) + "\r\n").encode()
        if self.file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def synced_size(self):
        """Bytes so far, safe on the disk: a checkpoint relies on them."""
        os.fsync(self.file.fileno())
        return os.fstat(self.file.fileno()).st_size


class RunLogger:
    """train.csv, eval.csv, TensorBoard and (with --track) Weights & Biases behind one call each."""

    EVAL_COLUMNS = ("step", "update", "hours", "episode", "return", "length")

    def __init__(self, run_dir, args, metrics, state=None):
        from torch.utils.tensorboard import SummaryWriter  # slow to import; not needed to read --help

        purge = 0 if state is None else state["step"] + (state["last_eval"] == state["step"])
        state = dict(hours=0.0, train_size=0, eval_size=0) if state is None else state["logger"]
        self.began = time.time() - 3600 * state["hours"]
        self.train_csv = CsvFile(run_dir / "train.csv", ("step", "update", "hours", *metrics), state["train_size"])
        self.eval_csv = CsvFile(run_dir / "eval.csv", self.EVAL_COLUMNS, state["eval_size"])
        self.tensorboard = SummaryWriter(run_dir, purge_step=purge)
        self.tensorboard.add_text("hyperparameters", "| flag | value |\n|---|---|\n" + "\n".join(
            f"| --{name.replace('_', '-')} | {value} |" for name, value in dataclasses.asdict(args).items()))
        self.wandb = start_wandb(run_dir, args) if args.track else None

    @property
    def hours(self):
        return (time.time() - self.began) / 3600

    def state(self):
        return {"hours": self.hours, "train_size": self.train_csv.synced_size(),
                "eval_size": self.eval_csv.synced_size()}

    def scalars(self, step, values):
        for key, value in values.items():
            self.tensorboard.add_scalar(key, value, step)
        if self.wandb:
            self.wandb.log({"step": step, **values})

    def train(self, step, update, metrics):
        values = {key: float(value) for key, value in metrics.items()}
        self.train_csv.write({"step": step, "update": update, "hours": f"{self.hours:.5f}",
                              **{key: f"{value:.6g}" for key, value in values.items()}})
        self.scalars(step, values)

    def evaluation(self, step, update, episodes):
        for number, (score, length) in enumerate(episodes):
            self.eval_csv.write({"step": step, "update": update, "hours": f"{self.hours:.5f}", "episode": number,
                                 "return": f"{score:.6g}", "length": length})
        scores = [score for score, _ in episodes]
        self.scalars(step, {"eval/return_mean": float(np.mean(scores)), "eval/return_std": float(np.std(scores))})

    def mooss_pictures(self, step, last_mooss_step, seq_len, pixel_scale):
        """What a MOOSS step saw: the newest frame of each observation above its masked self; and how similar queries
        (rows) and keys (columns) of a sequence are: bright on the diagonal, darker with temporal distance."""
        if last_mooss_step is None:
            return
        newest, masks, similarity = last_mooss_step
        pair = (torch.stack([newest, newest.masked_fill(masks, 0)]) * pixel_scale).clamp(0, 255).byte()
        pair = torch.nn.functional.pad(pair, (1, 1, 1, 1), value=255).expand(-1, -1, 3, -1, -1)  # (2, F, 3, H+2, W+2)
        strip = pair.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1).cpu().numpy()
        blocks = similarity.view(-1, seq_len, len(similarity) // seq_len, seq_len).diagonal(dim1=0, dim2=2).mean(2)
        heat = 255 * (blocks - blocks.min()) / (blocks.max() - blocks.min()).clamp(min=1e-6)
        heat = heat.byte().repeat_interleave(12, 0).repeat_interleave(12, 1)
        self.tensorboard.add_image("mooss/masked_observations", strip, step, dataformats="HWC")
        self.tensorboard.add_image("mooss/query_key_similarity", heat, step, dataformats="HW")

    def close(self):
        self.train_csv.file.close()
        self.eval_csv.file.close()
        self.tensorboard.close()
        if self.wandb:
            self.wandb.finish()


def start_wandb(run_dir, args):
    """A Weights & Biases run whose id is kept in the run folder, so that --resume continues it."""
    import wandb

    id_file = run_dir / "wandb_id.txt"
    if not id_file.exists():
        write_atomically(id_file, uuid.uuid4().hex[:8].encode())
    try:
        run = wandb.init(project=args.wandb_project, entity=args.wandb_entity, group=args.wandb_group,
                         name=run_dir.name, id=id_file.read_text(), resume="allow", dir=run_dir,
                         config=dataclasses.asdict(args))
    except wandb.errors.Error as error:
        raise UsageError(f"Weights & Biases refused ({error}): `wandb login` or WANDB_MODE=offline may help; repeat "
                         "the command with --resume") from error
    run.define_metric("*", step_metric="step")
    return run


class Progress:
    """A live bar on a terminal; elsewhere a plain line every half minute."""

    def __init__(self, total):
        self.total, self.live = total, sys.stdout.isatty()
        self.every = 0.5 if self.live else 30.0
        self.shown, self.mark, self.update_times = 0.0, None, []

    def show(self, step, update, metrics):
        now = time.time()
        if now - self.shown < self.every:
            return
        self.shown = now
        names = ("charts/episodic_return", "losses/critic", "losses/actor", "losses/rl", "losses/mooss")
        done = int(20 * min(1, step / self.total))
        text = f"[{'#' * done}{'-' * (20 - done)}] " if self.live else ""
        text += f"step {step:,}/{self.total:,}  update {update:,}  " + "  ".join(
            f"{name.split('/')[1]} {float(metrics[name]):.4g}" for name in names if name in metrics)
        if self.mark and step > self.mark[1]:
            then, old_step, old_update = self.mark
            left = datetime.timedelta(seconds=int((self.total - step) * (now - then) / (step - old_step)))
            text += f"  {(update - old_update) / (now - then):.2f} updates/s  ETA {left}"
        if self.mark is None or now - self.mark[0] > 60:  # rates over about the last minute
            self.mark = (now, step, update)
        self.say(text, end="" if self.live else "\n")

    def say(self, text, end="\n"):
        """Print a line without tearing the live one."""
        print(f"\r\033[K{text}" if self.live else text, end=end, flush=True)

    def warn_cpu(self, updates_left):
        """Called once an update: after the first five, tell how long the whole run will take."""
        self.update_times.append(time.time())
        if len(self.update_times) == 5:
            seconds = (self.update_times[4] - self.update_times[1]) / 3
            self.say(f"an update takes {seconds:.2f} s on this CPU, so this run needs about "
                     f"{seconds * updates_left / 3600:.1f} hours; --preset laptop has sizes for a CPU")


def due(step, every, stride, first=False):
    """Whether this step is the first at or after a multiple of `every` (0: never); step 0 counts only if `first`."""
    return every > 0 and step % every < stride and (step > 0 or first)


def mean_std(scores):
    return f"{np.mean(scores):.1f} ± {np.std(scores):.1f} over {len(scores)} episodes"


def print_banner(args, run_dir, device, replay, preset_fields):
    """What runs where, before anything slow begins."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    gl = os.environ.get("MUJOCO_GL", "unset")
    print(f"{args.env_id}, seed {args.seed}, preset {args.preset} -> {run_dir}\ndevice {device} ({name}), "
          f"MUJOCO_GL={gl}; replay {replay_bytes(replay) / 1e9:.2f} GB on {replay.device}\n"
          "resolved: " + " ".join(f"{field}={getattr(args, field)}" for field in preset_fields), flush=True)


def write_video(path, frames, fps=25):
    """An mp4 of RGB frames (T, H, W, 3), doubled in size so that players show more than a stamp."""
    import imageio

    path.parent.mkdir(exist_ok=True)
    doubled = np.repeat(np.repeat(np.asarray(frames), 2, axis=1), 2, axis=2)
    imageio.mimwrite(path, doubled, fps=fps, macro_block_size=2)
