"""Where the time of an update goes, and how close it is to the encoder work that cannot be avoided.

    python benchmark/speed.py --script dmc --preset laptop
    python benchmark/speed.py --script atari --growth --json
    # operator calls and GFLOP of an update, and what they let expect of some GPUs
    python benchmark/speed.py --script dmc --count
    # any flag of the script can follow
    python benchmark/speed.py --script dmc --compile --amp bf16

The floor is the bare encoder passes that an update needs, on the same shapes and memory format, in
the same run. DMC: forward and backward on N and on M*F observations, forward only on N (s', online
convs), N (s', target), M*F (keys), and on N every `--actor-update-freq` updates. Atari: forward and
backward on N and N*F, forward on 2N and N*F.
"""

import contextlib
import dataclasses
import itertools
import json
import platform
import re
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Literal
from unittest import mock

import numpy as np
import torch
import tyro
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import mooss_common as common
import rainbow_mooss_atari
import sac_mooss_dmc


@dataclasses.dataclass
class SpeedArgs:
    """Measure the stages of an update. Flags that are not listed here go to the script."""

    script: Literal["dmc", "atari"] = "dmc"  # which script
    repeats: int = 5  # measurements of each stage; the median counts
    growth: bool = False  # also how time grows with batch, sequence length, window, replay fill
    count: bool = False  # count operator calls and GFLOP instead; nothing is computed or timed
    json: bool = False  # print one JSON object instead of a table


# ------------------------------------------------------------------------------------------- clock
class Clock:
    """Milliseconds of a function, with the device synchronised around it."""

    def __init__(self, device, repeats):
        self.device = device
        self.repeats = repeats

    def __call__(self, function):
        """The median of some calls, after one that warms up."""
        times = [self.once(function) for _ in range(self.repeats + 1)]
        return statistics.median(times[1:])

    def once(self, function):
        began = self.now()
        function()
        return 1000 * (self.now() - began)

    def now(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def busy_seconds():
    """CPU seconds that all processes of this machine have used, or None where that is unknown."""
    with contextlib.suppress(OSError, ValueError):
        words = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        user, nice, system, _, _, irq, softirq, steal = map(int, words[:8])
        ticks = user + nice + system + irq + softirq + steal
        return ticks / 100  # the kernel's unit there, whatever its own clock
    return None


class Neighbours:
    """How much of the machine others used while a block ran."""

    def __enter__(self):
        self.began = self.now()
        return self

    def __exit__(self, *error):
        wall, own, everyone = [b - a for a, b in zip(self.began, self.now())]
        self.cores = max(0.0, everyone - own) / wall

    def now(self):
        own = time.process_time()
        everyone = busy_seconds()
        return time.perf_counter(), own, own if everyone is None else everyone


def too_busy(others, updates, floors):
    """Why figures that were taken in turn mean nothing, or None."""
    if others > 0.2:
        return f"other processes used {others:.1f} cores meanwhile"
    for name, times in (("update", updates), ("floor", floors)):
        low, middle, high = statistics.quantiles(times, n=4)
        if high - low > 0.25 * middle:
            return f"half of the {name}s took from {low:.1f} to {high:.1f} ms"
    if statistics.median(update / floor for update, floor in zip(updates, floors)) < 1:
        return "an update seemed faster than the encoder passes in it"
    return None


# ----------------------------------------------------------------------------------------- scripts
class DMC:
    """Agent, filled replay and stages of `sac_mooss_dmc.py`."""

    module = sac_mooss_dmc

    def __init__(self, args, device, env, rows, place=common.place_replay):
        self.args = args
        self.device = device
        shape = env.observation_space.shape
        actions = env.action_space.shape[0]
        self.agent = self.module.Agent(args, shape, actions, device)
        self.replay = place(
            args.replay_device, device, self.module.SequenceReplay,
            args.buffer_size, shape[1:], actions, args.frame_stack)
        rng = np.random.default_rng(0)
        frames = rng.integers(0, 256, (8, *shape[1:]), dtype=np.uint8)
        for row in range(rows):
            if row % 250 == 0:
                self.replay.begin_episode(frames[row % 8])
            action = rng.uniform(-1, 1, actions).astype(np.float32)
            self.replay.add(action, 0.1, False, frames[row % 8])
        self.index = 0

    def update(self):
        self.agent.update(self.replay, self.index, False)
        self.index += 1

    def fill(self, rows):
        frame = self.replay.frames[0].cpu().numpy()
        while self.replay.newest_row + 1 < rows:
            self.replay.add(np.zeros(self.agent.action_dim, np.float32), 0.0, False, frame)

    def sample(self):
        self.replay.sample(self.args.batch_size)
        self.replay.sample(self.args.aux_batch_size, self.args.seq_len)

    def stages(self, clock):
        args = self.args
        agent = self.agent
        replay = self.replay
        rows = replay.sample(args.batch_size)
        starts = replay.sample(args.aux_batch_size, args.seq_len)
        long_rows = starts[:, None] + torch.arange(args.seq_len)
        action, reward, terminated = common.upload(replay.steps(rows), self.device)
        actions, rewards, _ = common.upload(replay.steps(long_rows), self.device)
        images = replay.observations(rows)
        long_images = replay.observations(long_rows)
        obs = self.module.augment(images, args, self.device, False)
        long_obs = self.module.augment(long_images, args, self.device, True)
        noise = torch.randn(len(rows), agent.action_dim, device=self.device)

        def gather():
            for which in (rows, rows + 1, long_rows, long_rows):
                replay.observations(which)
            replay.steps(rows)
            replay.steps(long_rows)

        def augment():
            for which in (images, images, long_images, long_images):
                self.module.augment(which, args, self.device, True)

        def critic():
            agent.critic_loss(obs, action, reward, terminated, obs, noise)[0].backward()

        def actor():
            agent.actor_loss(obs, noise)[0].backward()

        stages = {
            "sample": clock(self.sample), "gather": clock(gather), "augment": clock(augment),
            "critic": clock(critic), "actor": clock(actor),
        }
        stages |= mooss_stages(
            self, clock, long_obs, actions, rewards[..., None], (), agent.critic.encoder)
        indices = itertools.count()
        stages["target updates"] = clock(lambda: agent.update_targets(next(indices)))
        return stages

    def floor(self):
        """The bare encoder passes of the update that comes next."""
        args = self.args
        encoder = self.agent.critic.encoder
        short = args.batch_size
        long = args.aux_batch_size * args.seq_len
        actor = self.index % args.actor_update_freq == 0
        encoder_passes(encoder, [short, long], [], self.inputs)
        encoder_passes(encoder.convs, [], [short] * (2 if actor else 1), self.inputs)
        encoder_passes(encoder, [], [short, long], self.inputs)

    def phases(self):
        agent = self.agent
        return [
            (self.replay, "sample steps observations", "draw and gather"),
            (self.module, "augment", "augment"),
            (agent, "masks", "masks"),
            (agent, "critic_loss", "critic loss"),
            (agent, "actor_loss", "actor loss"),
            (agent, "encode_keys", "keys"),
            (agent, "mooss_loss", "MOOSS loss"),
            (agent, "backward", "backward passes"),
            (agent, "update_targets", "target updates"),
            *[(optimizer, "step", "optimise") for optimizer in agent.optimizers.values()],
        ]


class Atari:
    """Agent, filled replay and stages of `rainbow_mooss_atari.py`."""

    module = rainbow_mooss_atari

    def __init__(self, args, device, env, rows, place=common.place_replay):
        self.args = args
        self.device = device
        shape = env.observation_space.shape
        self.agent = self.module.Agent(args, shape, int(env.action_space.n), device)
        self.replay = place(
            args.replay_device, device, self.module.SequenceReplay,
            args.buffer_size, shape[1:], args.frame_stack, args.seq_len, args.multi_step)
        rng = np.random.default_rng(0)
        frames = rng.integers(0, 256, (8, *shape[1:]), dtype=np.uint8)
        for row in range(rows):
            if row % 200 == 0:
                self.replay.begin_episode(frames[row % 8])
            action = int(rng.integers(self.agent.num_actions))
            self.replay.add(action, 0.1, row % 200 == 199, frames[row % 8])
        self.index = 0

    def update(self):
        self.agent.update(self.replay, self.index, 0.5, False)
        self.index += 1

    def fill(self, rows):
        frame = self.replay.frames[0].cpu().numpy()
        while self.replay.newest_row + 1 < rows:
            self.replay.add(0, 0.0, False, frame)

    def sample(self):
        return self.replay.sample(self.args.batch_size, 0.5)

    def stages(self, clock):
        args = self.args
        agent = self.agent
        replay = self.replay
        rows, weights = self.sample()
        returns, discounts = common.upload(replay.returns(rows, args.gamma), self.device)
        actions, rewards, valid = common.upload(replay.sequences(rows), self.device)
        weights = common.upload(weights, self.device)
        stacks = agent.stacks(replay, rows, args.seq_len)
        obs = self.module.augment(stacks[:, :1], args)
        long_obs = self.module.augment(stacks, args)
        one_hot = agent.mooss_batch(stacks, actions, rewards, valid, weights, 0)[2]
        priorities = common.upload(weights, replay.device)

        def gather():
            replay.returns(rows, args.gamma)
            replay.sequences(rows)
            agent.stacks(replay, rows, args.seq_len)
            agent.stacks(replay, rows + args.multi_step, 1)

        def augment():
            for which in (*[stacks[:, :1]] * 3, stacks, stacks):
                self.module.augment(which, args)

        def rl():
            agent.rl_loss(obs, actions[:, 0], returns, discounts, obs, obs)[0].mean().backward()

        def set_priorities():
            replay.set_priorities(rows, priorities, args.priority_exponent)

        stages = {
            "sample": clock(self.sample), "gather": clock(gather), "augment": clock(augment),
            "rl loss": clock(rl),
        }
        stages |= mooss_stages(
            self, clock, long_obs, one_hot, rewards[..., None], (valid, weights),
            agent.online.state)
        stages["priorities"] = clock(set_priorities)
        indices = itertools.count()
        stages["target updates"] = clock(lambda: agent.update_targets(next(indices)))
        return stages

    def floor(self):
        """The bare encoder passes of an update."""
        short = self.args.batch_size
        long = self.args.batch_size * self.args.seq_len
        encode = self.agent.online.features
        encoder_passes(encode, [short, long], [short, short, long], self.inputs)

    def phases(self):
        agent = self.agent
        return [
            (self.replay, "sample returns sequences frames_of", "draw and gather"),
            (self.replay, "set_priorities", "priorities"),
            (self.module, "augment replicate_borders stack_frames", "augment"),
            (agent, "masks", "masks"),
            (agent.online, "draw_noise", "noise of the layers"),
            (agent, "rl_loss", "RL loss"),
            (agent, "encode_keys", "keys"),
            (agent, "mooss_loss", "MOOSS loss"),
            (agent, "backward", "backward pass"),
            (agent, "update_targets", "target updates"),
            *[(optimizer, "step", "optimise") for optimizer in agent.optimizers.values()],
        ]


CASES = {"dmc": DMC, "atari": Atari}


def encoder_passes(encode, with_backward, forward_only, inputs):
    """Encoder passes on batches of these sizes and nothing else."""
    for size in with_backward:
        encode(inputs[size]).sum().backward()
    with torch.no_grad():
        for size in forward_only:
            encode(inputs[size])


def mooss_stages(case, clock, obs, actions, rewards, rest, encode):
    """The parts of a MOOSS step, each by itself."""
    args = case.args
    agent = case.agent
    keys = agent.encode_keys(obs)
    states = encode(obs).detach().unflatten(0, (-1, args.seq_len))
    similarity = torch.randn(len(keys), len(keys), device=case.device, requires_grad=True)
    valid = rest[0] if rest else None
    indices = itertools.count()

    def loss():
        case.module.temporal_contrastive_loss(
            similarity, args.seq_len, args.temporal_window, valid=valid)

    def whole():
        agent.mooss_loss(obs, keys, actions, rewards, *rest)[0].backward()

    def optimise():
        for optimizer in agent.optimizers.values():
            optimizer.step()

    def log():
        case.module.rank_accuracy(similarity, args.seq_len, args.temporal_window).item()

    whole()
    forward = {
        "query encode": clock(lambda: encode(obs)),
        "decode": clock(lambda: agent.decoder(states, actions, rewards)),
        "loss": clock(loss),
    }
    return {
        "mask": clock(lambda: agent.masks(next(indices))),
        "key encode": clock(lambda: agent.encode_keys(obs)),
        **forward,
        "backward": max(0.0, clock(whole) - sum(forward.values())),
        "optimise": clock(optimise),
        "logging": clock(log),
    }


# ----------------------------------------------------------------------------------------- measure
def measure(args, speed):
    device = common.pick_device(args.device)
    common.configure_torch(args.seed, device, args.torch_deterministic)
    clock = Clock(device, speed.repeats)
    env = CASES[speed.script].module.make_env(args, device)
    case = CASES[speed.script](args, device, env, min(args.buffer_size, 1000))
    stages = environment_stages(case, clock, env)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(2):  # warm up: compilation, the first masks, optimiser states
        case.update()
    if args.aux_weight > 0:  # a block of masks is drawn beside many updates, not these few
        for block in case.agent.masks.blocks.values():
            block.result()
    peak = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    channels = args.frame_stack * env.observation_space.shape[1]
    sizes = (args.batch_size, args.seq_len * getattr(args, "aux_batch_size", args.batch_size))
    case.inputs = {
        size: torch.rand(size, channels, args.image_size, args.image_size, device=device)
        .contiguous(memory_format=torch.channels_last) for size in sizes}
    case.floor()
    updates = []
    floors = []
    with Neighbours() as neighbours:
        for _ in range(2 * speed.repeats):  # in turn, so that what slows one slows both
            floors.append(clock.once(case.floor))
            updates.append(clock.once(case.update))
    result = {
        "script": speed.script, "preset": args.preset, "hardware": hardware(device),
        "torch": torch.__version__, "compile": args.compile, "amp": args.amp,
        "stages_ms": stages | case.stages(clock),
        **compared(updates, floors, neighbours.cores),
        "peak_update_bytes": peak, "replay_bytes": common.replay_bytes(case.replay),
    }
    if speed.growth:
        result["growth"] = growth(case, clock)
    env.close()
    return result


def compared(updates, floors, others):
    """Milliseconds of updates and floors that ran in turn, and their ratio if it means something.

    A machine that others use gives no result: there is a sentence instead.
    """
    busy = too_busy(others, updates, floors)
    ratios = [update / floor for update, floor in zip(updates, floors)]
    update = statistics.median(updates)
    return {
        "update_ms": update,
        "update_ms_range": (min(updates), max(updates)),
        "floor_ms": statistics.median(floors),
        "floor_ms_range": (min(floors), max(floors)),
        "other_cores": others,
        "too_busy": busy,
        "ratio": None if busy else statistics.median(ratios),
        "ratio_range": None if busy else (min(ratios), max(ratios)),
        "updates_per_second": None if busy else 1000 / update,
    }


def environment_stages(case, clock, env):
    obs, _ = env.reset(seed=0)

    def step():
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            env.reset(seed=0)

    stages = {"act": clock(lambda: case.agent.act(obs)), "env step": clock(step)}
    if getattr(env.unwrapped, "render_mode", None) == "rgb_array":
        stages["render"] = clock(env.unwrapped.render)
        stages["env step"] = max(0.0, stages["env step"] - stages["render"])
    return stages


def kept_bytes(forward):
    """Bytes of the distinct tensors that autograd keeps for the backward pass of `forward()`."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()  # alive while counted, so that no address is used twice
        return sum(kept.values()) if loss is not None else 0


def growth(case, clock):
    """Time and memory against batch size, sequence length, window L and replay fill."""
    rows = []

    def loss_row(what, value, batch, length, window):
        side = batch * length
        similarity = torch.randn(side, side, device=case.device, requires_grad=True)

        def loss():
            return case.module.temporal_contrastive_loss(similarity, length, window)

        rows.append({
            "what": what, "value": value, "stage": "loss",
            "ms": clock(lambda: loss().backward()), "mb": kept_bytes(loss) / 1e6})

    for batch in (16, 32, 64):
        loss_row("batch size", batch, batch, 16, 6)
    for length in (8, 16, 32):
        loss_row("sequence length", length, 16, length, 6)
    for window in (0, 3, 6, 12):
        loss_row("window L", window, 64, 16, window)
    for share in (0.1, 0.5, 1.0):
        filled = int(share * case.replay.capacity)
        case.fill(filled)
        rows.append({
            "what": "replay fill", "value": filled, "stage": "sample",
            "ms": clock(case.sample), "mb": common.replay_bytes(case.replay) / 1e6})
    return rows


def hardware(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return f"{model[1] if model else platform.processor()}, {torch.get_num_threads()} threads"


# ------------------------------------------------------------------------------------------- count
class Counter(TorchDispatchMode):
    """Operator calls that give a device work, and their floating point operations, by phase."""

    def __init__(self):
        super().__init__()
        self.phase = "rest"
        self.calls = {}
        self.flop = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if gives_work(function):
            self.calls[self.phase] = self.calls.get(self.phase, 0) + 1
        formula = flop_registry.get(function.overloadpacket)
        if formula is not None:
            flop = formula(*args, **(kwargs or {}), out_val=result)
            self.flop[self.phase] = self.flop.get(self.phase, 0) + flop
        return result

    def watched(self, function, phase):
        """The function, with what it does noted under this phase, except for inner phases."""
        def call(*args, **kwargs):
            before = self.phase
            self.phase = phase
            try:
                return function(*args, **kwargs)
            finally:
                self.phase = before
        return call


def gives_work(function):
    """Whether a device has something to do, unlike for a view or a piece of empty memory."""
    name = function.name()
    free = ("aten::detach", "aten::_unsafe_view", "aten::empty", "aten::new_empty")
    return not function.is_view and not name.startswith(free)


def count(args, speed):
    """Calls and GFLOP of an even and an odd update, on tensors that have only a shape.

    Attention takes more calls here than on a GPU, which has one kernel for it.
    """
    meta = torch.device("meta")
    args = dataclasses.replace(args, compile=False, amp="none")
    case_class = CASES[speed.script]
    module = case_class.module
    env = module.make_env(args, torch.device("cpu"))
    with contextlib.ExitStack() as stack:
        # Torch has fused optimisers, kernels for lists of tensors and autocast for real devices
        # only; masks are few here.
        stack.enter_context(mock.patch(
            "torch.optim.optimizer._get_fused_kernels_supported_devices", lambda: ["meta"]))
        stack.enter_context(mock.patch(
            "torch.nn.utils.clip_grad._has_foreach_support", lambda *_: True))
        stack.enter_context(mock.patch.object(
            module.Agent, "autocast", lambda agent: contextlib.nullcontext()))
        stack.enter_context(mock.patch.object(module.MaskBank, "BLOCK", 2))
        rows = 2 * args.seq_len + getattr(args, "multi_step", 0)
        case = case_class(
            args, meta, env, rows, lambda _, device, build, *shape: build(*shape, device))
        for _ in range(2):  # the states of the optimisers are made
            case.update()
        counted = {parity: count_update(case) for parity in ("even", "odd")}
    env.close()
    names = dict.fromkeys(itertools.chain(*[counter.calls for counter in counted.values()]))
    phases = {
        name: {parity: (counter.calls.get(name, 0), counter.flop.get(name, 0) / 1e9)
               for parity, counter in counted.items()}
        for name in names}
    calls = {parity: sum(counter.calls.values()) for parity, counter in counted.items()}
    gflop = {parity: sum(counter.flop.values()) / 1e9 for parity, counter in counted.items()}
    return {
        "script": speed.script, "preset": args.preset, "torch": torch.__version__,
        "phases": phases, "calls": calls, "gflop": gflop,
        "estimates": estimates(
            statistics.mean(calls.values()), statistics.mean(gflop.values())),
    }


def count_update(case):
    counter = Counter()
    with contextlib.ExitStack() as stack:
        for owner, names, phase in case.phases():
            for name in names.split():
                watched = counter.watched(getattr(owner, name), phase)
                stack.enter_context(mock.patch.object(owner, name, watched))
        stack.enter_context(counter)
        case.update()
    return counter


# Peaks that the makers publish, in TFLOP/s, for what the convolutions use: TF32, and fp32 on a T4.
PEAKS = {"T4": 8.1, "RTX 3090": 35.6, "RTX 4090": 82.6, "A100": 156.0, "H100 SXM": 494.0}
SHARE_OF_PEAK = 0.3
MICROSECONDS_A_CALL = 8.0


def estimates(calls, gflop):
    """What the counts let expect of GPUs: the host queues calls while the device computes."""
    queue = calls * MICROSECONDS_A_CALL / 1000
    lines = []
    for name, peak in PEAKS.items():
        compute = gflop / (SHARE_OF_PEAK * peak)  # GFLOP / (TFLOP/s) = ms
        lines.append(
            f"{name}: estimate, not measured: {max(queue, compute):.0f} ms an update, the longer "
            f"of {queue:.0f} ms ({calls:.0f} calls, assuming {MICROSECONDS_A_CALL:.0f} us of the "
            f"host each) and {compute:.0f} ms ({gflop:,.0f} GFLOP, assuming "
            f"{SHARE_OF_PEAK:.0%} of a peak of {peak:g} TFLOP/s, and that nothing else limits)")
    return lines


# -------------------------------------------------------------------------------------------- main
def print_count(result):
    print(
        f"{result['script']}, preset {result['preset']}, torch {result['torch']}: operator calls "
        "and GFLOP of an update that is not logged\n")
    print("| phase | calls, even | calls, odd | GFLOP, even | GFLOP, odd |\n|---|---|---|---|---|")
    total = {parity: (result["calls"][parity], result["gflop"][parity])
             for parity in ("even", "odd")}
    for name, row in {**result["phases"], "all": total}.items():
        (even_calls, even_gflop), (odd_calls, odd_gflop) = row["even"], row["odd"]
        print(f"| {name} | {even_calls} | {odd_calls} | {even_gflop:,.1f} | {odd_gflop:,.1f} |")
    print("", *result["estimates"], sep="\n")


def print_measured(result):
    print(
        f"{result['script']}, preset {result['preset']}, {result['hardware']}, torch "
        f"{result['torch']}, compile {result['compile']}, amp {result['amp']}\n")
    print("| stage | ms |\n|---|---|")
    for stage, value in result["stages_ms"].items():
        print(f"| {stage} | {value:.2f} |")
    update = "update {:.1f} ms ({:.1f} to {:.1f})".format(
        result["update_ms"], *result["update_ms_range"])
    floor = "floor {:.1f} ms ({:.1f} to {:.1f})".format(
        result["floor_ms"], *result["floor_ms_range"])
    print(f"\n{update}, {floor}")
    if result["too_busy"]:
        print(f"no result: the machine was too busy for these figures: {result['too_busy']}")
    else:
        ratio = "{:.2f} ({:.2f} to {:.2f})".format(result["ratio"], *result["ratio_range"])
        print(f"update / floor {ratio}, {result['updates_per_second']:.2f} updates/s")
    print(
        f"peak memory of an update {result['peak_update_bytes'] / 1e9:.2f} GB, replay "
        f"{result['replay_bytes'] / 1e9:.2f} GB")
    if "growth" in result:
        print("\n| against | value | stage | ms | MB |\n|---|---|---|---|---|")
    for row in result.get("growth", []):
        print(
            f"| {row['what']} | {row['value']} | {row['stage']} | {row['ms']:.3f} | "
            f"{row['mb']:.1f} |")


def main(argv=None):
    speed, passed = tyro.cli(SpeedArgs, args=argv, return_unknown_args=True)
    common.require(speed.repeats >= 1, f"--repeats {speed.repeats} measures nothing")
    module = CASES[speed.script].module
    args = module.resolve_args(common.parse_args(module.Args, module.fill_presets, passed))
    common.require(args.aux_weight > 0, "--aux-weight 0 has no MOOSS step to measure")
    result = count(args, speed) if speed.count else measure(args, speed)
    if speed.json:
        print(json.dumps(result))
    elif speed.count:
        print_count(result)
    else:
        print_measured(result)
    return 0


if __name__ == "__main__":
    common.exit_with(main)
