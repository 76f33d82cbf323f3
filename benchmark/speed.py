"""Where the time of an update goes, and how close it is to the encoder work that cannot be avoided.

    python benchmark/speed.py --script dmc --preset laptop
    python benchmark/speed.py --script atari --growth --json
    python benchmark/speed.py --script dmc --compile --amp bf16      # any flag of the script can follow

The floor is the bare encoder passes that an update needs, on the same shapes and memory format, in the same run. DMC:
forward and backward on N and on M*F observations, forward only on N (s', online convs), N (s', target), M*F (keys),
and on N every `--actor-update-freq` updates. Atari: forward and backward on N and N*F, forward on 2N and N*F.
"""

import dataclasses
import json
import platform
import re
import resource
import sys
import time
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import mooss_common as common
import rainbow_mooss_atari
import sac_mooss_dmc


@dataclasses.dataclass
class SpeedArgs:
    """Measure the stages of an update. Flags that are not listed here go to the script as they are."""

    script: Literal["dmc", "atari"] = "dmc"  # which script
    repeats: int = 5  # measurements of each stage; the median counts
    growth: bool = False  # also measure how time grows with batch size, sequence length, window and replay fill
    json: bool = False  # print one JSON object instead of a table


class Clock:
    """Median milliseconds of a stage, with the device synchronised around it."""

    def __init__(self, device, repeats):
        self.device, self.repeats = device, repeats

    def __call__(self, function):
        times = []
        for _ in range(self.repeats + 1):  # the first warms up
            began = self.now()
            function()
            times.append(1000 * (self.now() - began))
        return float(np.median(times[1:]))

    def now(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class DMC:
    """Agent, filled replay and stages of `sac_mooss_dmc.py`."""

    module = sac_mooss_dmc

    def __init__(self, args, device, env, rows):
        self.args, self.device = args, device
        shape, actions = env.observation_space.shape, env.action_space.shape[0]
        self.agent = self.module.Agent(args, shape, actions, device)
        home = common.place_replay(args.replay_device, device, lambda device: self.module.SequenceReplay(
            args.buffer_size, shape[1:], actions, args.frame_stack, 0, device))
        rng, self.replay = np.random.default_rng(0), home
        frames = rng.integers(0, 256, (8, *shape[1:]), dtype=np.uint8)
        for row in range(rows):
            action = None if row % 250 == 0 else rng.uniform(-1, 1, actions).astype(np.float32)
            self.replay.add(frames[row % 8], action, 0.1, False)
        self.update_number = 0

    def update(self, log=False):
        self.agent.update(self.replay, self.update_number, log)
        self.update_number += 1

    def stages(self, clock):
        args, agent, replay, device = self.args, self.agent, self.replay, self.device
        rows, starts = replay.sample_rows(args.batch_size), replay.sample_rows(args.aux_batch_size, args.seq_len)
        sequence = starts[:, None] + torch.arange(args.seq_len)
        obs = self.module.augment(replay, rows, args, device, False)
        action, reward, ended = (x.to(device) for x in replay.outcomes(rows))
        noise = torch.randn(len(rows), agent.action_dim, device=device)
        long_obs = self.module.augment(replay, sequence, args, device, True)
        actions, rewards, _ = (x.to(device) for x in replay.outcomes(sequence))

        def critic():
            agent.critic_loss(obs, action, reward, ended, obs, noise)[0].backward()

        def actor():
            first, second, _ = agent.actor_loss(obs, noise)
            (first + second).backward(inputs=[*agent.actor.parameters(), agent.log_alpha])

        def targets():
            self.module.ema_update(agent.critic_target, agent.critic, 0.99)
            self.module.ema_update(agent.key_encoder, agent.critic.encoder, 0.95)

        def sample():
            replay.sample_rows(args.batch_size), replay.sample_rows(args.aux_batch_size, args.seq_len)

        def augment():
            for which, out in ((rows, None), (rows + 1, None), *[(sequence, agent.obs_buffer)] * 2):
                self.module.augment(replay, which, args, device, True, out=out)

        stages = {"sample": clock(sample), "augment": clock(augment), "critic": clock(critic), "actor": clock(actor)}
        agent.key_states(long_obs)
        return stages | mooss_stages(self, clock, long_obs, actions, rewards[..., None], (), agent.critic.encoder) | {
            "target updates": clock(targets)}

    def floor(self):
        """The bare encoder passes of one update."""
        args, encoder = self.args, self.agent.critic.encoder
        actor = self.update_number % args.actor_update_freq == 0
        short, long = args.batch_size, args.aux_batch_size * args.seq_len
        bare(encoder, [short, long], [], self)
        bare(encoder.convs, [], [short] * (2 if actor else 1), self)
        bare(encoder, [], [short, long], self)


class Atari:
    """Agent, filled replay and stages of `rainbow_mooss_atari.py`."""

    module = rainbow_mooss_atari

    def __init__(self, args, device, env, rows):
        self.args, self.device = args, device
        shape = env.observation_space.shape
        self.agent = self.module.Agent(args, shape, int(env.action_space.n), device)
        self.replay = common.place_replay(args.replay_device, device, lambda device: self.module.SequenceReplay(
            args.buffer_size, shape[1:], args.frame_stack, args.seq_len, args.multi_step, device))
        rng = np.random.default_rng(0)
        frames = rng.integers(0, 256, (8, *shape[1:]), dtype=np.uint8)
        for row in range(rows):
            self.replay.add(frames[row % 8], int(rng.integers(self.agent.num_actions)), 0.1, row % 200 == 199)
        self.update_number = 0

    def update(self, log=False):
        self.agent.update(self.replay, self.update_number, 0.5, log)
        self.update_number += 1

    def stages(self, clock):
        args, agent, replay, device = self.args, self.agent, self.replay, self.device
        rows, weights = replay.sample(args.batch_size, 0.5)
        frames = replay.frames_for(rows, args.seq_len)
        returns, going = (x.to(device) for x in replay.returns(rows, args.gamma))
        actions, rewards, valid = (x.to(device) for x in replay.sequences(rows))
        frames, next_frames = frames.to(device), replay.frames_for(rows + args.multi_step, 1).to(device)
        stacks = self.module.stack_frames(frames, args)
        obs, long_obs = (self.module.random_intensity(self.module.random_crop(x, args), args)
                         for x in (stacks[:, :1], stacks))
        one_hot = torch.nn.functional.one_hot(actions, agent.num_actions).float()
        rest = valid, weights.to(device)

        def sample():
            rows, _ = replay.sample(args.batch_size, 0.5)
            replay.returns(rows, args.gamma), replay.sequences(rows), replay.frames_for(rows, args.seq_len)

        def augment():
            stacks, next_stacks = (self.module.stack_frames(x, args) for x in (frames, next_frames))
            for which, out in ((stacks[:, :1], None), *[(next_stacks, None)] * 2, *[(stacks, agent.obs_buffer)] * 2):
                self.module.random_intensity(self.module.random_crop(which, args), args, out)

        def rl():
            agent.rl_loss(obs, actions[:, 0], returns, going, obs, obs)[0].mean().backward()

        stages = {"sample": clock(sample), "augment": clock(augment), "rl loss": clock(rl)}
        stages |= mooss_stages(self, clock, long_obs, one_hot, rewards[..., None], rest, agent.online.state)
        return stages | {
            "priorities": clock(lambda: replay.set_priorities(rows, weights, args.priority_exponent)),
            "target updates": clock(lambda: self.module.ema_update(agent.target, agent.online, 0.0))}

    def floor(self):
        args, encode = self.args, self.agent.online.features
        short, long = args.batch_size, args.batch_size * args.seq_len
        bare(encode, [short, long], [short, short, long], self)


def bare(encode, with_backward, forward_only, case):
    """Encoder passes on batches of these sizes and nothing else."""
    for size in with_backward:
        encode(case.inputs[size]).sum().backward()
    with torch.no_grad():
        for size in forward_only:
            encode(case.inputs[size])


def mooss_stages(case, clock, obs, actions, rewards, rest, encode):
    """The parts of a MOOSS step, each by itself."""
    args, agent, module, counter = case.args, case.agent, case.module, iter(range(10**9))
    keys, = agent.key_states(obs)
    states = encode(obs).detach().view(-1, args.seq_len, args.state_dim)
    similarity = torch.randn(len(keys), len(keys), device=case.device, requires_grad=True)

    def loss():
        valid = rest[0] if rest else None
        module.temporal_contrastive_loss(similarity, args.seq_len, args.temporal_window, valid=valid)

    def whole():
        agent.mooss_loss(obs, keys, actions, rewards, *rest)[0].backward()

    def log():
        module.rank_accuracy(similarity, args.seq_len, args.temporal_window).item()

    optimisers = list(agent.optimizers.values())
    whole()
    forward = {"query encode": clock(lambda: encode(obs)),
               "decode": clock(lambda: agent.decoder(states, actions, rewards)), "loss": clock(loss)}
    return {"mask": clock(lambda: agent.masks(next(counter))), "key encode": clock(lambda: agent.key_states(obs)),
            **forward, "backward": max(0.0, clock(whole) - sum(forward.values())),
            "optimise": clock(lambda: [optimiser.step() for optimiser in optimisers]), "logging": clock(log)}


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
    """Time and memory against batch size, sequence length, window L and replay fill, one thing at a time."""
    module, device, rows = case.module, case.device, []

    def loss_row(what, value, batch, length, window):
        similarity = torch.randn(batch * length, batch * length, device=device, requires_grad=True)

        def loss():
            return module.temporal_contrastive_loss(similarity, length, window)

        rows.append({"what": what, "value": value, "stage": "loss", "ms": clock(lambda: loss().backward()),
                     "mb": kept_bytes(loss) / 1e6})

    for batch in (16, 32, 64):
        loss_row("batch size", batch, batch, 16, 6)
    for length in (8, 16, 32):
        loss_row("sequence length", length, 16, length, 6)
    for window in (0, 3, 6, 12):
        loss_row("window L", window, 64, 16, window)
    sample = (lambda: case.replay.sample(32, 0.5)) if case.module is rainbow_mooss_atari else (
        lambda: case.replay.sample_rows(512))
    frame = case.replay.frames[0].cpu().numpy()
    action = 0 if case.module is rainbow_mooss_atari else np.zeros(case.agent.action_dim, np.float32)
    for share in (0.1, 0.5, 1.0):
        while case.replay.rows < share * case.replay.capacity:
            case.replay.add(frame, action, 0.0, False)
        rows.append({"what": "replay fill", "value": case.replay.rows, "stage": "sample", "ms": clock(sample),
                     "mb": common.replay_bytes(case.replay) / 1e6})
    return rows


def hardware(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return f"{model[1] if model else platform.processor()}, {torch.get_num_threads()} threads"


def measure(args, speed):
    device = common.pick_device(args.device)
    common.configure_torch(args.seed, device, args.torch_deterministic)
    clock = Clock(device, speed.repeats)
    module = {"dmc": sac_mooss_dmc, "atari": rainbow_mooss_atari}[speed.script]
    env = module.make_env(args, device)
    case = {"dmc": DMC, "atari": Atari}[speed.script](args, device, env, min(args.buffer_size, 1000))
    obs, _ = env.reset(seed=0)
    stages = {"act": clock(lambda: case.agent.act(obs if speed.script == "dmc" else obs[None]))}

    def step():
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            env.reset(seed=0)

    stages["env step"] = clock(step)
    if speed.script == "dmc" and getattr(env.unwrapped, "render_mode", None) == "rgb_array":
        stages["render"] = clock(env.unwrapped.render)
        stages["env step"] = max(0.0, stages["env step"] - stages["render"])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(2):  # warm up: compilation, the first masks, optimiser states
        case.update()
    peak = (torch.cuda.max_memory_allocated(device) if device.type == "cuda"
            else 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
    channels = args.frame_stack * env.observation_space.shape[1]
    sizes = (args.batch_size, args.seq_len * getattr(args, "aux_batch_size", args.batch_size))
    case.inputs = {size: torch.rand(size, channels, args.image_size, args.image_size, device=device).contiguous(
        memory_format=torch.channels_last) for size in sizes}
    case.floor()
    updates, floors = [], []
    for _ in range(2 * speed.repeats):  # update and floor in turn, so that a busy machine slows both
        for function, times in ((case.floor, floors), (case.update, updates)):
            began = clock.now()
            function()
            times.append(1000 * (clock.now() - began))
    update, floor = float(np.mean(updates)), float(np.mean(floors))
    result = {
        "script": speed.script, "preset": args.preset, "hardware": hardware(device), "torch": torch.__version__,
        "compile": args.compile, "amp": args.amp, "stages_ms": stages | case.stages(clock), "update_ms": update,
        "floor_ms": floor, "ratio": update / floor, "updates_per_second": 1000 / update,
        "peak_update_bytes": peak, "replay_bytes": common.replay_bytes(case.replay)}
    if speed.growth:
        result["growth"] = growth(case, clock)
    env.close()
    return result


def main(argv=None):
    speed, passed = tyro.cli(SpeedArgs, args=argv, return_unknown_args=True)
    module = {"dmc": sac_mooss_dmc, "atari": rainbow_mooss_atari}[speed.script]
    args = module.resolve_args(common.parse_args(module.Args, passed))
    common.require(args.aux_weight > 0, "--aux-weight 0 has no MOOSS step to measure")
    result = measure(args, speed)
    if speed.json:
        print(json.dumps(result))
        return 0
    print(f"{speed.script}, preset {args.preset}, {result['hardware']}, torch {result['torch']}, compile "
          f"{args.compile}, amp {args.amp}\n\n| stage | ms |\n|---|---|")
    for stage, value in result["stages_ms"].items():
        print(f"| {stage} | {value:.2f} |")
    print(f"\nupdate {result['update_ms']:.1f} ms, floor {result['floor_ms']:.1f} ms, update / floor "
          f"{result['ratio']:.2f}, {result['updates_per_second']:.2f} updates/s\npeak memory of an update "
          f"{result['peak_update_bytes'] / 1e9:.2f} GB, replay {result['replay_bytes'] / 1e9:.2f} GB")
    if speed.growth:
        print("\n| against | value | stage | ms | MB |\n|---|---|---|---|---|")
        for row in result["growth"]:
            print(f"| {row['what']} | {row['value']} | {row['stage']} | {row['ms']:.3f} | {row['mb']:.1f} |")
    return 0


if __name__ == "__main__":
    common.exit_with(main)
