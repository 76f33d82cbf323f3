"""MOOSS on the DeepMind Control Suite: SAC from pixels with a masked, ranked temporal contrastive loss beside it.

Paper: Sun et al., "MOOSS: Mask-Enhanced Temporal Contrastive Learning for Smooth State Evolution in Visual RL" (2025).
Numbers such as `D7` point to the ledger of details in the README.

    python sac_mooss_dmc.py --env-id reacher-easy --seed 1                     # the paper's run: a GPU and some hours
    python sac_mooss_dmc.py --env-id cartpole-swingup --preset laptop          # two CPU cores, about two hours
    python sac_mooss_dmc.py --env-id cartpole-swingup --aux-weight 0 --exp-name base        # the paper's Base agent
    python sac_mooss_dmc.py --env-id reacher-easy --seed 1 --resume            # go on after a stop of any kind
    python sac_mooss_dmc.py --eval-only --checkpoint runs/reacher-easy__mooss__s1/checkpoint.pt
    tensorboard --logdir runs
"""

import os

# On some virtual CPUs oneDNN picks AMX for bf16 and the process dies; it reads this when torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import copy
import dataclasses
import functools
import math
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import mooss_common as common

SCRIPT = "sac_mooss_dmc"  # what a checkpoint says it was written by


@dataclasses.dataclass
class Args:
    """SAC + MOOSS on DeepMind Control. Unset flags take the paper's value for the task, unless --preset says else."""

    env_id: str = "reacher-easy"  # task of the suite: domain-task
    seed: int = 1  # of networks, environment, replay and masks
    exp_name: str = "mooss"  # name of the variant, part of the run folder's name
    run_root: str = "runs"  # folder that holds the run folders
    preset: Literal["paper", "authors", "laptop"] = "paper"  # the tables / the authors' code (ledger D) / CPU sizes
    total_timesteps: int = 100_000  # length of the run (env steps): 100k and 500k are the benchmarks
    eval_every: int = 5000  # time between evaluations (env steps)
    eval_episodes: int | None = None  # episodes per evaluation (paper: 10)
    checkpoint_every: int = 10_000  # time between checkpoints (env steps); 0: only at the end and on a signal
    log_every: int = 100  # time between rows of train.csv (updates)
    resume: bool = False  # continue the run in its folder; begin it if there is none
    eval_only: bool = False  # evaluate --checkpoint, write eval_only.csv and a video beside it, and leave
    checkpoint: str | None = None  # checkpoint file for --eval-only
    capture_video: bool = False  # save an mp4 of the first episode of every evaluation
    track: bool = False  # log to Weights & Biases too
    wandb_project: str = "mooss"  # W&B project
    wandb_entity: str | None = None  # W&B team or user
    wandb_group: str | None = None  # W&B group of runs
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    replay_device: Literal["auto", "cpu", "cuda"] = "auto"  # where the frames live; auto: on the GPU when they fit
    torch_deterministic: bool = False  # deterministic kernels on CUDA too (slower)
    compile: bool = False  # torch.compile the losses
    amp: Literal["none", "bf16"] = "none"  # networks in bfloat16; log-probabilities, targets, logits stay fp32

    # Observations and replay

    frame_stack: int = 3  # frames in an observation (c / 3)
    render_size: int | None = None  # side of a rendered frame (pixels; paper: 100)
    image_size: int | None = None  # side of a cropped observation, H = W (pixels; paper: 84)
    camera_id: int = 0  # camera of the suite
    action_repeat: int | None = None  # env steps per agent step (paper: 2, 4 or 8 by task)
    augmentations: tuple[Literal["crop", "intensity"], ...] = ("crop", "intensity")  # without crop: the centre
    intensity_scale: float = 0.05  # intensity multiplies an observation by 1 + scale * clip(N(0,1), -2, 2)
    rl_intensity: bool = False  # random intensity on the RL batch too (D9)
    crop_per_sequence: bool = False  # one crop for an auxiliary sequence, not one per observation (D10)
    pixel_scale: float | None = None  # pixels are divided by this (D11; default 255; authors' code: 1)
    buffer_size: int = 100_000  # frames kept in the replay (agent steps)
    init_steps: int = 1000  # random actions before learning starts (agent steps)

    # SAC

    batch_size: int | None = None  # batch for policy learning (paper: 512)
    optimizer: Literal["adam", "adamw"] = "adam"  # optimiser of every module
    rl_lr: float | None = None  # learning rate of actor and critic (paper: 0.0002 cheetah-run, 0.001 otherwise)
    beta1: float = 0.9  # Adam beta_1, except for the temperature
    beta2: float = 0.999  # Adam beta_2, except for the temperature
    alpha_lr: float = 1e-4  # learning rate of the temperature
    alpha_beta1: float = 0.5  # Adam beta_1 of the temperature
    alpha_beta2: float = 0.999  # Adam beta_2 of the temperature
    init_temperature: float = 0.1  # initial temperature alpha
    gamma: float = 0.99  # discount factor
    critic_ema: float = 0.99  # EMA m of the target critic's heads (Q-function EMA)
    critic_encoder_ema: float = 0.95  # EMA m of the target critic's encoder
    critic_target_update_freq: int = 2  # time between target critic updates (updates)
    actor_update_freq: int = 2  # time between actor and temperature updates (updates; D12)
    state_dim: int = 64  # state representation dimension d
    num_filters: int | None = None  # filters of each conv layer (64)
    hidden_dim: int | None = None  # hidden units of actor and critic (1024)

    # MOOSS

    aux_weight: float = 0.1  # weight lambda of the MOOSS loss; 0 is the paper's Base
    aux_batch_size: int | None = None  # sequences per auxiliary batch (paper: 128)
    aux_lr: float | None = None  # learning rate of the MOOSS step (paper: 0.0001 cheetah-run, 0.0005 otherwise)
    aux_warmup_steps: int = 6000  # its linear warm-up (updates; 0: constant rate; D7)
    aux_lr_decay: bool = True  # after the warm-up the rate falls as 1 / sqrt(update) (D7)
    max_grad_norm: float = 10.0  # gradient norm limit of the MOOSS step (D14)
    seq_len: int = 16  # sequence length F (agent steps)
    cube_size: int = 7  # spatial size of a cube, h = w (pixels)
    cube_len: int | None = None  # temporal length f of a cube (agent steps; paper: 4 or 8 by task)
    mask_type: Literal["walk", "cube"] = "walk"  # random walk on the cube graph, or uniform as in MLR
    mask_ratio: float = 0.5  # share p_m of the cubes that is zeroed
    walk_connectivity: Literal[26, 6] = 26  # neighbours of an inner cube (D4)
    walk_root: Literal["random", "fixed"] | None = None  # start of the walk (D5; default random; authors' code: fixed)
    share_mask: bool | None = None  # one mask for the whole batch (D6; default no; authors' code: yes)
    decoder_inputs: Literal["none", "s", "sa", "sar"] = "sa"  # tokens: states, actions, rewards; none: MLP head alone
    decoder_depth: int = 2  # Transformer blocks of g_phi
    decoder_heads: int = 4  # attention heads
    head_dim: int = 100  # hidden units of the decoder's MLP head
    temporal_window: int | None = None  # temporal window L (D1; paper: 6; authors' code: 5)
    tau0: float = 0.07  # contrastive temperature tau_0
    tau_step: float = 0.075  # contrastive temperature step tau_{l+1} - tau_l
    level_reduction: Literal["mean", "sum"] = "mean"  # how the levels of a query combine (D2)
    normalize_embeddings: bool = True  # L2-normalise queries and keys before W (D3)
    target_update_period: int | None = None  # time between key encoder updates (updates; D8; paper: 1)
    target_ema: float | None = None  # EMA m of the key encoder (paper: 0.9 walker-walk, 0.95 otherwise)


PAPER = dict(eval_episodes=10, render_size=100, image_size=84, action_repeat=4, pixel_scale=255.0, batch_size=512,
             rl_lr=1e-3, num_filters=64, hidden_dim=1024, aux_batch_size=128, aux_lr=5e-4, cube_len=8,
             walk_root="random", share_mask=False, temporal_window=6, target_update_period=1, target_ema=0.95)
PRESETS = {
    "paper": {},
    "authors": dict(temporal_window=5, walk_root="fixed", share_mask=True, target_update_period=2, pixel_scale=1.0),
    "laptop": dict(eval_episodes=3, render_size=50, image_size=42, batch_size=192, num_filters=48, hidden_dim=512,
                   aux_batch_size=24),
}
TASK_PRESETS = {
    "finger-spin": dict(action_repeat=2),
    "cartpole-swingup": dict(action_repeat=8, cube_len=4),
    "reacher-easy": dict(cube_len=4),
    "cheetah-run": dict(rl_lr=2e-4, aux_lr=1e-4),
    "walker-walk": dict(action_repeat=2, target_ema=0.9),
}


def resolve_args(args):
    """Fill what is unset (explicit flag > preset > task > paper) and refuse values that cannot work."""
    env_id = args.env_id.removeprefix("dm_control/").removesuffix("-v0")
    values = {**PAPER, **TASK_PRESETS.get(env_id, {}), **PRESETS[args.preset]}
    args = dataclasses.replace(args, env_id=env_id, **{k: v for k, v in values.items() if getattr(args, k) is None})
    common.require_name("--env-id", env_id)
    common.require_name("--exp-name", args.exp_name)
    below_one = (0.0, 0.999999)
    common.check_numbers(  # an int is at least 1 and a float lies in [0, 1], except
        args, seed=(0, 2**32 - 1), checkpoint_every=(0, math.inf), aux_warmup_steps=(0, math.inf), camera_id=(-1, 99),
        frame_stack=(1, 16), render_size=(15, 1024), image_size=(15, args.render_size), pixel_scale=(1e-3, 1e6),
        buffer_size=(2 * args.seq_len + args.frame_stack, 10**8), beta1=below_one, beta2=below_one,
        alpha_beta1=below_one, alpha_beta2=below_one, init_temperature=(1e-6, 1e3), aux_weight=(0.0, 1e3),
        max_grad_norm=(1e-6, math.inf), cube_size=(1, args.image_size), cube_len=(1, args.seq_len),
        decoder_heads=(1, args.state_dim), temporal_window=(0, args.seq_len - 1), tau0=(1e-3, 1e3), tau_step=(0, 1e3))
    for whole, part in (("image_size", "cube_size"), ("seq_len", "cube_len"), ("state_dim", "decoder_heads")):
        a, b = getattr(args, whole), getattr(args, part)
        common.require(a % b == 0, f"--{part} {b} does not divide --{whole} {a}".replace("_", "-"))
    common.require(args.aux_weight == 0 or args.init_steps >= args.seq_len,
                   f"--init-steps {args.init_steps} collects no sequence of --seq-len {args.seq_len} to learn from")
    common.require(args.checkpoint is not None or not args.eval_only, "--eval-only needs --checkpoint PATH")
    return args


# ------------------------------------------------------------------------------------------------- environment
class ActionRepeat(gym.Wrapper):
    """Take an action several times and sum its rewards; the wrapper around this one renders the last sub-step only."""

    def __init__(self, env, repeat):
        super().__init__(env)
        self.repeat = repeat

    def step(self, action):
        total = 0.0
        for _ in range(self.repeat):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += reward
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, info


def make_env(args, device):
    """A task of the suite with observations (frame_stack, 3, render_size, render_size) and actions in [-1, 1]."""
    common.use_headless_gl(device)
    import shimmy.utils.envs_configs  # only now: it imports dm_control, which binds the GL backend for good

    tasks = ["-".join(task) for task in shimmy.utils.envs_configs.DM_CONTROL_SUITE_ENVS]
    common.require_known("--env-id", args.env_id, tasks)
    view = dict(height=args.render_size, width=args.render_size, camera_id=args.camera_id)
    full_id = f"dm_control/{args.env_id}-v0"
    env = gym.make(full_id, disable_env_checker=True, render_mode="rgb_array", render_kwargs=view)
    model, limit = env.unwrapped.physics.model, env.unwrapped._step_limit
    cameras, largest = model.ncam, min(model.vis.global_.offwidth, model.vis.global_.offheight)
    common.require(-1 <= args.camera_id < cameras,
                   f"--camera-id {args.camera_id} does not exist: {args.env_id} has 0 to {cameras - 1} (-1: free)")
    common.require(args.render_size <= largest, f"--render-size {args.render_size} is above this task's {largest}")
    common.require(limit < math.inf, f"--env-id {args.env_id} has no time limit: its episodes would never end")
    common.require(limit // args.action_repeat >= args.seq_len, f"an episode of {limit:.0f} env steps at "
                   f"--action-repeat {args.action_repeat} is shorter than --seq-len {args.seq_len}")
    env = ActionRepeat(gym.wrappers.RescaleAction(env, -1.0, 1.0), args.action_repeat)
    env = gym.wrappers.AddRenderObservation(env, render_only=True)  # (H, W, 3)
    frame_space = gym.spaces.Box(0, 255, (3, args.render_size, args.render_size), np.uint8)
    env = gym.wrappers.TransformObservation(env, lambda frame: frame.transpose(2, 0, 1), frame_space)
    return gym.wrappers.FrameStackObservation(env, args.frame_stack, padding_type="reset")


# ------------------------------------------------------------------------------------------------- replay
class SequenceReplay:
    """Every frame once, as uint8; stacks, next observations and sequences are gathered by index.

    A row is what arrives: a frame with the action and reward that led to it. Rows are numbered from the start of the
    run and never change; row r lives in slot r % capacity. Row r and row r + 1 of one episode make a transition.
    """

    columns = ("frames", "actions", "rewards", "terminated", "first_rows")  # what a row holds

    def __init__(self, capacity, frame_shape, action_dim, frame_stack, seed, device):
        self.capacity, self.frame_stack, self.device = capacity, frame_stack, device
        self.frames = torch.zeros(capacity, *frame_shape, dtype=torch.uint8, device=device)
        self.actions = torch.zeros(capacity, action_dim, device=device)
        self.rewards = torch.zeros(capacity, device=device)
        self.terminated = torch.zeros(capacity, dtype=torch.bool, device=device)
        self.first_rows = torch.zeros(capacity, dtype=torch.long)  # first row of the row's episode; indices are CPU's
        self.rows, self.first_row = 0, 0
        self.rng = np.random.default_rng(seed)
        self.saved_pieces, self.saved_at = [], None  # what this run's last checkpoint holds (mooss_common)

    def add(self, frame, action=None, reward=0.0, terminated=False):
        """Store a frame with what led to it; without an action it is the first frame of an episode."""
        slot = self.rows % self.capacity
        if action is None:
            self.first_row = self.rows
        self.frames[slot] = torch.as_tensor(frame)
        self.actions[slot] = 0.0 if action is None else torch.as_tensor(action)
        self.rewards[slot] = reward
        self.terminated[slot] = terminated
        self.first_rows[slot] = self.first_row
        self.rows += 1

    def sample_rows(self, count, length=1):
        """Uniform start rows, each followed by `length` rows of its own episode, its frames not yet overwritten.

        Rows that fail are drawn again: few do, and the rest stay uniform (D16, D17). (count,)
        """
        oldest, firsts, found = max(0, self.rows - self.capacity), self.first_rows.numpy(), np.zeros(0, np.int64)
        for _ in range(10_000):
            rows = self.rng.integers(oldest, self.rows - length, count)
            first, last = firsts[rows % self.capacity], firsts[(rows + length) % self.capacity]
            valid = (first == last) & (np.maximum(first, rows - self.frame_stack + 1) >= oldest)
            found = np.concatenate([found, rows[valid]])
            if len(found) >= count:
                return torch.from_numpy(found[:count])
        raise common.UsageError(f"no episode holds {length} steps in a row: use a smaller --seq-len")

    def outcomes(self, rows):
        """What followed the observations at `rows`: actions (..., A), rewards (...), terminated (...)."""
        slots = ((rows + 1) % self.capacity).to(self.device, non_blocking=True)
        return self.actions[slots], self.rewards[slots], self.terminated[slots]

    def observations(self, rows, top, left, size):
        """Stacks at `rows` (...), cropped at (top, left): (..., frame_stack * C, size, size), uint8.

        The crop is fused into the gather: a view of all windows of all frames costs nothing, and indexing it copies
        only the pixels that are used. Before an episode's first frame, that frame is repeated.
        """
        back = torch.arange(self.frame_stack - 1, -1, -1)
        stack = torch.maximum(rows[..., None] - back, self.first_rows[rows % self.capacity][..., None])
        slots = (stack % self.capacity).to(self.device, non_blocking=True)
        windows = self.frames.unfold(2, size, 1).unfold(3, size, 1)  # (capacity, C, H-size+1, W-size+1, size, size)
        return windows[slots, :, top[..., None], left[..., None]].flatten(-4, -3)

    def state_dict(self):
        return {"rng": self.rng.bit_generator.state, "rows": self.rows, "first_row": self.first_row}

    def load_state_dict(self, state):
        self.rng.bit_generator.state = state["rng"]
        self.rows, self.first_row = state["rows"], state["first_row"]


def augment(replay, rows, args, device, intensity, crop_per_sequence=False, out=None):
    """Observations at `rows` as floats on the training device, randomly cropped, randomly bright: (N, C, H, W).

    Large batches go into memory that is kept (`out`): on a CPU, fresh pages cost more than the pixels that fill them.
    """
    margin = args.render_size - args.image_size
    if "crop" in args.augmentations:
        shape = (len(rows), 1) if crop_per_sequence else rows.shape
        top, left = torch.randint(margin + 1, (2, *shape), device=replay.device)  # D15
    else:
        top, left = torch.full((2, *rows.shape), margin // 2, device=replay.device)
    pixels = replay.observations(rows, top, left, args.image_size).flatten(0, -4)  # uint8 until here
    if out is None:
        out = torch.empty_like(pixels, dtype=torch.float32, device=device, memory_format=torch.channels_last)
    obs = out.copy_(pixels, non_blocking=True)
    scale = torch.full((len(obs), 1, 1, 1), 1 / args.pixel_scale, device=device)
    if intensity and "intensity" in args.augmentations:
        scale = scale * (1 + args.intensity_scale * torch.randn_like(scale).clamp(-2, 2))
    return obs.mul_(scale)


# ------------------------------------------------------------------------------------------------- masks
def random_walk_masks(count, grid, ratio, generator, connectivity=26, root="random"):
    """Masks (count, *grid), True = masked: the first floor(ratio * nodes) distinct nodes of a random walk (Eq. 2).

    All walks advance together; every 64 steps those that have their nodes leave.
    """
    cells = torch.cartesian_prod(*(torch.arange(n) for n in grid))  # (N, 3)
    steps = torch.cartesian_prod(*[torch.arange(-1, 2)] * 3)
    steps = steps[(steps.abs().sum(1) > 0) & (steps.abs().sum(1) <= (3 if connectivity == 26 else 1))]  # D4
    reached, nodes, width = cells[:, None] + steps, len(cells), len(steps)  # (N, 26, 3)
    inside = ((reached >= 0) & (reached < torch.tensor(grid))).all(2)
    degree = inside.sum(1).float()
    index = (reached * torch.tensor([grid[1] * grid[2], grid[2], 1])).sum(2).where(inside, 0)
    neighbours = index.gather(1, inside.int().argsort(dim=1, descending=True)).flatten()  # those inside come first
    masks = torch.zeros(count * nodes, dtype=torch.bool)
    target = math.floor(ratio * nodes)
    if target > 0:
        node = (torch.randint(nodes, (count,), generator=generator) if root == "random"
                else torch.full((count,), nodes // 2))  # D5: the authors' root
        first = torch.arange(count) * nodes  # a walk's first entry in the flat masks
        masks[first + node] = True
        missing = torch.full((count,), target - 1)
        while len(node) > 0:
            for draw in torch.rand(64, len(node), generator=generator):
                node = neighbours.take(node * width + (draw * degree.take(node)).long())
                seen = masks.take(first + node)
                fresh = (missing > 0) & ~seen
                masks.index_put_((first + node,), seen | fresh)
                missing -= fresh.long()
            walking = missing > 0
            node, first, missing = node[walking], first[walking], missing[walking]
    return masks.view(count, *grid)


def uniform_cube_masks(count, grid, ratio, generator):
    """Masks (count, *grid), True = masked: floor(ratio * nodes) nodes drawn uniformly without replacement, as MLR."""
    nodes = math.prod(grid)
    rank = torch.rand(count, nodes, generator=generator).argsort(dim=1).argsort(dim=1)
    return (rank < math.floor(ratio * nodes)).view(count, *grid)


class MaskBank:
    """Masks for many updates drawn at once, which makes a walk cheap; a pure function of (seed, update)."""

    UPDATES = 64

    def __init__(self, args, batch_size, device):
        self.args, self.batch_size, self.device, self.block = args, batch_size, device, None
        side = args.image_size // args.cube_size
        self.grid = (args.seq_len // args.cube_len, side, side)

    def __call__(self, update):
        """Masks of an update as pixels: (B * F, 1, H, W), True = masked."""
        args, block = self.args, update // self.UPDATES
        if block != self.block:
            generator = torch.Generator().manual_seed(common.derive_seed(args.seed, "masks", block))
            count = self.UPDATES * (1 if args.share_mask else self.batch_size)  # D6
            if args.mask_type == "walk":
                masks = random_walk_masks(count, self.grid, args.mask_ratio, generator, args.walk_connectivity,
                                          args.walk_root)
            else:
                masks = uniform_cube_masks(count, self.grid, args.mask_ratio, generator)
            self.masks = masks.view(self.UPDATES, -1, *self.grid).to(self.device, non_blocking=True)
            self.block = block
        masks = self.masks[update % self.UPDATES].expand(self.batch_size, *self.grid)
        masks = masks.repeat_interleave(args.cube_len, 1)  # (B, F, H/h, W/w)
        masks = masks.repeat_interleave(args.cube_size, 2).repeat_interleave(args.cube_size, 3)  # (B, F, H, W)
        return masks.flatten(0, 1)[:, None]


# ------------------------------------------------------------------------------------------------- networks
def init_weights(module):
    """Orthogonal linear layers, delta-orthogonal convs (all weight at the kernel's centre), zero biases."""
    if isinstance(module, nn.Linear):
        nn.init.orthogonal_(module.weight)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Conv2d):
        middle = module.kernel_size[0] // 2
        nn.init.zeros_(module.weight)
        nn.init.orthogonal_(module.weight.data[:, :, middle, middle], nn.init.calculate_gain("relu"))
        nn.init.zeros_(module.bias)


class Encoder(nn.Module):
    """f_theta: observation (B, C, H, W) -> state (B, d). The actor shares `convs` and has a projection of its own."""

    def __init__(self, channels, image_size, num_filters, state_dim):
        super().__init__()
        layers = [nn.Conv2d(channels, num_filters, 3, stride=2), nn.ReLU(inplace=True)]
        for _ in range(3):
            layers += [nn.Conv2d(num_filters, num_filters, 3), nn.ReLU(inplace=True)]
        self.convs = nn.Sequential(*layers, nn.Flatten())
        self.features = num_filters * ((image_size - 3) // 2 + 1 - 6) ** 2
        self.projection = nn.Sequential(nn.Linear(self.features, state_dim), nn.LayerNorm(state_dim))

    def forward(self, obs):
        return self.projection(self.convs(obs))


def mlp(inputs, hidden, outputs):
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
                         nn.Linear(hidden, outputs))


LOG_STD_MIN = -10
LOG_STD_MAX = 2


class Actor(nn.Module):
    """Tanh-squashed Gaussian policy on the critic's conv features."""

    def __init__(self, features, state_dim, hidden_dim, action_dim):
        super().__init__()
        self.projection = nn.Sequential(nn.Linear(features, state_dim), nn.LayerNorm(state_dim))
        self.head = mlp(state_dim, hidden_dim, 2 * action_dim)

    def forward(self, features):
        outputs = self.head(self.projection(features)).to(self.head[0].weight.dtype)  # out of bf16
        mean, log_std = outputs.chunk(2, dim=-1)
        return mean, LOG_STD_MIN + (LOG_STD_MAX - LOG_STD_MIN) * (torch.tanh(log_std) + 1) / 2

    def sample(self, features, noise):
        """Action and log-probability (B, 1) for standard normal `noise` (B, A), in fp32."""
        mean, log_std = self(features)
        action = torch.tanh(mean + log_std.exp() * noise)
        log_prob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi) - torch.log(1 - action**2 + 1e-6)
        return action, log_prob.sum(-1, keepdim=True)


class Critic(nn.Module):
    """Encoder and two Q functions on (state, action)."""

    def __init__(self, encoder, state_dim, hidden_dim, action_dim):
        super().__init__()
        self.encoder = encoder
        self.heads = nn.ModuleList(mlp(state_dim + action_dim, hidden_dim, 1) for _ in range(2))

    def forward(self, state, action):
        state_action = torch.cat([state, action], dim=-1)
        return [head(state_action).to(action.dtype) for head in self.heads]  # out of bf16


class PredictiveDecoder(nn.Module):
    """g_phi: masked states and actions -> queries (Sec. 4.2). `inputs` names the tokens of a step: s, sa or sar.

    `none` leaves only the MLP head. Tokens are interleaved s_0 a_0 s_1 a_1 ..., and a_i is the action taken at o_i, so
    the causal query i sees the states up to i and the actions before i.
    """

    def __init__(self, state_dim, action_dim, depth=2, heads=4, head_dim=100, inputs="sa"):
        super().__init__()
        self.inputs = inputs
        if inputs != "none":
            self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(
                state_dim, heads, 4 * state_dim, dropout=0.0, activation="gelu", layer_norm_eps=1e-6, batch_first=True,
                norm_first=True) for _ in range(depth))
            self.norm = nn.LayerNorm(state_dim, eps=1e-6)
            self.embed_action = nn.Linear(action_dim, state_dim) if "a" in inputs else None
            self.embed_reward = nn.Linear(1, state_dim) if "r" in inputs else None
            for module in self.modules():  # torch starts q, k, v (one 3d x d matrix) this way already
                if isinstance(module, nn.Linear):
                    nn.init.xavier_uniform_(module.weight)
                    nn.init.zeros_(module.bias)
        self.head = nn.Sequential(nn.Linear(state_dim, head_dim), nn.ReLU(), nn.Linear(head_dim, state_dim))

    def forward(self, states, actions, rewards=None):
        if self.inputs == "none":
            return self.head(states)
        batch, length, dim = states.shape
        tokens = [states]
        if self.embed_action is not None:
            tokens.append(self.embed_action(actions))
        if self.embed_reward is not None:
            tokens.append(self.embed_reward(rewards))
        position = torch.arange(length, device=states.device)[:, None]
        angle = position * torch.exp(torch.arange(0, dim, 2, device=states.device) * (-math.log(10000.0) / dim))
        encoding = torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1)[:, :dim]  # (F, d)
        x = (torch.stack(tokens, dim=2) + encoding[:, None]).flatten(1, 2)  # (B, F * tokens, d)
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=causal, is_causal=True)
        return self.head(self.norm(x).view(batch, length, len(tokens), dim)[:, :, 0])


# ------------------------------------------------------------------------------------------------- loss
def temporal_contrastive_loss(similarity, seq_len, window, tau0=0.07, tau_step=0.075, reduction="mean", weights=None,
                              valid=None):
    """Ranked InfoNCE (Eq. 7): at level l, keys l steps away against keys at least l steps away and other sequences.

    similarity (B*F, B*F) has queries as rows and keys as columns, sequences contiguous; weights (B,) scale a
    sequence's queries; valid (B, F) is False for steps that are neither query nor key. The large cross-sequence part
    changes only by its temperature from level to level; what else changes lies in the small blocks of a sequence.
    """
    batch, length = len(similarity) // seq_len, seq_len
    blocks = similarity.view(batch, length, batch, length)
    own = torch.eye(batch, dtype=torch.bool, device=similarity.device)[:, None, :, None]
    valid = torch.ones(batch, length, dtype=torch.bool, device=similarity.device) if valid is None else valid
    nothing = torch.finfo(similarity.dtype).min  # exp(nothing) is 0, and unlike -inf it makes no NaN gradient
    across = blocks.masked_fill(own | ~valid, nothing).flatten(2)  # (B, F, B*F): keys of other sequences
    within = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # (B, F, F): keys of the same sequence
    time = torch.arange(length, device=similarity.device)
    distance = (time[:, None] - time).abs()  # (F, F)

    total, counted_pairs = similarity.new_zeros(()), similarity.new_zeros(())
    weights = similarity.new_ones(batch) if weights is None else weights
    for level in range(window + 1):
        tau = tau0 + level * tau_step
        positive = (distance == level) & valid[:, None]  # (B, F, F)
        further = (distance >= level) & valid[:, None]
        logits = within / tau
        log_positives = logits.masked_fill(~positive, nothing).logsumexp(2)
        log_further = logits.masked_fill(~further, nothing).logsumexp(2)
        log_others = (across / tau).logsumexp(2)
        losses = torch.logaddexp(log_further, log_others) - log_positives  # (B, F)
        counted = valid & positive.any(2)
        total = total + (weights[:, None] * losses).masked_fill(~counted, 0).sum()
        counted_pairs = counted_pairs + counted.sum()
    return total / (counted_pairs if reduction == "mean" else valid.sum()).clamp(min=1)


@torch.no_grad()
def rank_accuracy(similarity, seq_len, window, valid=None):
    """Share of key pairs, l and l + 1 steps from a query (l < window), in which the nearer key is more similar."""
    batch = len(similarity) // seq_len
    within = similarity.view(batch, seq_len, batch, seq_len).diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # (B, F, F)
    time = torch.arange(seq_len, device=similarity.device)
    distance = (time[:, None] - time).abs()
    pairs = (distance[:, :, None] + 1 == distance[:, None, :]) & (distance[:, :, None] < window)  # query, near, far
    pairs = pairs.expand(batch, -1, -1, -1)
    if valid is not None:
        pairs = pairs & valid[:, :, None, None] & valid[:, None, :, None] & valid[:, None, None, :]
    return (pairs & (within[:, :, :, None] > within[:, :, None, :])).sum() / pairs.sum().clamp(min=1)


@torch.no_grad()
def ema_update(target, online, m):
    """target = m * target + (1 - m) * online, for all parameters in a few kernels."""
    torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), 1 - m)


# ------------------------------------------------------------------------------------------------- agent
METRICS = ("charts/episodic_return", "losses/critic", "losses/actor", "losses/alpha", "losses/mooss", "sac/alpha",
           "sac/entropy", "sac/q1", "sac/q2", "sac/target_q", "mooss/grad_norm", "mooss/lr", "mooss/mask_fraction",
           "mooss/top1_accuracy", "mooss/rank_accuracy", "charts/rl_lr", "encoder/state_std", "encoder/dead_features")


class Agent(nn.Module):
    """Networks, optimisers and a method per loss. Losses map tensors to tensors, so that they compile."""

    def __init__(self, args, obs_shape, action_dim, device):
        super().__init__()
        self.args, self.device, self.action_dim = args, device, action_dim
        self.frame_channels = obs_shape[1]
        encoder = Encoder(obs_shape[0] * obs_shape[1], args.image_size, args.num_filters, args.state_dim)
        self.critic = Critic(encoder, args.state_dim, args.hidden_dim, action_dim).apply(init_weights)
        self.actor = Actor(encoder.features, args.state_dim, args.hidden_dim, action_dim).apply(init_weights)
        self.critic_target = copy.deepcopy(self.critic).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(args.init_temperature)))  # D18
        if args.aux_weight > 0:
            self.key_encoder = copy.deepcopy(encoder).requires_grad_(False)
            self.decoder = PredictiveDecoder(args.state_dim, action_dim, args.decoder_depth, args.decoder_heads,
                                             args.head_dim, args.decoder_inputs)
            self.bilinear = nn.Parameter(torch.rand(args.state_dim, args.state_dim))  # W of sim(q, k) = q W k
            self.masks = MaskBank(args, args.aux_batch_size, device)
            shape = (args.aux_batch_size * args.seq_len, obs_shape[0] * obs_shape[1], args.image_size, args.image_size)
            self.obs_buffer = torch.zeros(shape, device=device).to(memory_format=torch.channels_last)
        self.to(device, memory_format=torch.channels_last)

        adam = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[args.optimizer]
        betas, alpha_betas = (args.beta1, args.beta2), (args.alpha_beta1, args.alpha_beta2)
        self.optimizers = {
            "critic": adam(self.critic.parameters(), lr=args.rl_lr, betas=betas, fused=True),
            "actor": adam(self.actor.parameters(), lr=args.rl_lr, betas=betas, fused=True),
            "alpha": adam([self.log_alpha], lr=args.alpha_lr, betas=alpha_betas, weight_decay=0.0, fused=True)}
        if args.aux_weight > 0:
            self.aux_parameters = [*encoder.parameters(), *self.decoder.parameters(), self.bilinear]
            self.optimizers["aux"] = adam(self.aux_parameters, lr=args.aux_lr, betas=betas, fused=True)
        for name in ("critic_loss", "key_states", "mooss_loss", "actor_loss"):
            setattr(self, name, common.maybe_compile(getattr(self, name), args.compile, device))
        self.metrics, self.non_finite, self.last_mooss_step = {}, {}, None

    def autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.args.amp == "bf16")

    @torch.no_grad()
    def act(self, obs, deterministic=False):
        """Action for one observation (frame_stack, C, H, W) uint8, centre-cropped."""
        margin, size = (self.args.render_size - self.args.image_size) // 2, self.args.image_size
        obs = torch.as_tensor(obs, device=self.device)[..., margin:margin + size, margin:margin + size]
        obs = (obs.flatten(0, 1)[None].float() / self.args.pixel_scale).contiguous(memory_format=torch.channels_last)
        with self.autocast():
            mean, log_std = self.actor(self.critic.encoder.convs(obs))
        action = mean if deterministic else mean + log_std.exp() * torch.randn_like(mean)
        return torch.tanh(action)[0].cpu().numpy()

    def critic_loss(self, obs, action, reward, terminated, next_obs, noise):
        """Twin soft Q loss; time limits bootstrap, real terminations cut."""
        with torch.no_grad(), self.autocast():
            next_action, log_prob = self.actor.sample(self.critic.encoder.convs(next_obs), noise)
            target_q1, target_q2 = self.critic_target(self.critic_target.encoder(next_obs), next_action)
            value = torch.minimum(target_q1, target_q2) - self.log_alpha.exp() * log_prob
            target = reward[:, None] + self.args.gamma * value * ~terminated[:, None]
        with self.autocast():
            q1, q2 = self.critic(self.critic.encoder(obs), action)
        loss = F.mse_loss(q1, target) + F.mse_loss(q2, target)
        return loss, q1.mean(), q2.mean(), target.mean()

    def key_states(self, obs):
        with torch.no_grad(), self.autocast():
            return self.key_encoder(obs).to(self.bilinear.dtype),  # (B*F, d)

    def mooss_loss(self, masked_obs, keys, actions, rewards):
        """L_MOOSS of a batch of sequences, and the similarity matrix (B*F, B*F) it ranks."""
        args = self.args
        with self.autocast():
            states = self.critic.encoder(masked_obs).view(-1, args.seq_len, args.state_dim)
            queries = self.decoder(states, actions, rewards).flatten(0, 1).to(self.bilinear.dtype)
        if args.normalize_embeddings:  # D3
            queries, keys = F.normalize(queries, dim=1, eps=1e-3), F.normalize(keys, dim=1, eps=1e-3)
        similarity = queries @ self.bilinear @ keys.T  # (B*F, B*F)
        loss = temporal_contrastive_loss(similarity, args.seq_len, args.temporal_window, args.tau0, args.tau_step,
                                         args.level_reduction)
        return loss, similarity

    def actor_loss(self, obs, noise):
        """Actor and temperature losses; one pass of the shared convs, which these losses do not touch."""
        with self.autocast():
            with torch.no_grad():
                features = self.critic.encoder.convs(obs)
                state = self.critic.encoder.projection(features)
            action, log_prob = self.actor.sample(features, noise)
            q1, q2 = self.critic(state, action)
        alpha = self.log_alpha.exp()
        actor_loss = (alpha.detach() * log_prob - torch.minimum(q1, q2)).mean()
        alpha_loss = (alpha * (-log_prob.detach() + self.action_dim)).mean()  # target entropy -A
        return actor_loss, alpha_loss, -log_prob.mean()

    @torch.no_grad()
    def encoder_metrics(self, obs):
        """How far states of a batch differ from each other, and which share of conv features is zero on all of it."""
        with self.autocast():
            features = self.critic.encoder.convs(obs)
            states = self.critic.encoder.projection(features)
        return {"encoder/state_std": states.std(0).mean(),
                "encoder/dead_features": (features == 0).all(0).float().mean()}

    def aux_learning_rate(self, update):
        """D7: a linear rise from 0.0005 of the rate to all of it, then a fall with the square root of time."""
        warmup = self.args.aux_warmup_steps
        if update < warmup:
            factor = 0.0005 + (1 - 0.0005) * update / warmup
        else:
            factor = math.sqrt(warmup / update) if warmup and self.args.aux_lr_decay else 1.0
        return factor * self.args.aux_lr

    def update(self, replay, update, log):
        """One update: critic, MOOSS, actor and temperature, target networks. Nothing here waits for the device."""
        args, metrics = self.args, self.metrics
        if args.compile and self.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        rows = replay.sample_rows(args.batch_size)
        obs = augment(replay, rows, args, self.device, intensity=args.rl_intensity)  # D9
        next_obs = augment(replay, rows + 1, args, self.device, intensity=args.rl_intensity)
        action, reward, terminated = (x.to(self.device, non_blocking=True) for x in replay.outcomes(rows))
        noise = torch.randn(2, len(rows), self.action_dim, device=self.device)

        loss, q1, q2, target = self.critic_loss(obs, action, reward, terminated, next_obs, noise[0])
        self.optimizers["critic"].zero_grad()
        loss.backward()
        self.optimizers["critic"].step()
        metrics |= {"losses/critic": loss.detach(), "sac/q1": q1.detach(), "sac/q2": q2.detach(),
                    "sac/target_q": target, "charts/rl_lr": args.rl_lr}
        if log:
            metrics |= self.encoder_metrics(obs)

        if args.aux_weight > 0:
            self.mooss_step(replay, update, log)

        if update % args.actor_update_freq == 0:  # D12
            self.actor_step(obs, noise[1])
        self.update_targets(update)
        common.flag_non_finite(self.non_finite, metrics)

    def mooss_step(self, replay, update, log):
        """A step of its own on lambda * L_MOOSS, after the critic's (D14)."""
        args, optimizer = self.args, self.optimizers["aux"]
        starts = replay.sample_rows(args.aux_batch_size, args.seq_len)
        rows = starts[:, None] + torch.arange(args.seq_len)  # (B, F)
        drawn = args, self.device, True, args.crop_per_sequence, self.obs_buffer  # D10
        keys, = self.key_states(augment(replay, rows, *drawn))
        obs = augment(replay, rows, *drawn)  # in the keys' memory, which is free again
        actions, rewards, _ = (x.to(self.device, non_blocking=True) for x in replay.outcomes(rows))
        masks = self.masks(update)
        newest = obs[:args.seq_len, -self.frame_channels:].clone() if log else None
        obs *= ~masks  # in place: a copy would be half a gigabyte at the paper's size
        loss, similarity = self.mooss_loss(obs, keys, actions, rewards[..., None])
        optimizer.zero_grad()
        (args.aux_weight * loss).backward()
        grad_norm = nn.utils.clip_grad_norm_(self.aux_parameters, args.max_grad_norm)
        optimizer.param_groups[0]["lr"] = self.aux_learning_rate(update)
        optimizer.step()
        self.metrics |= {"losses/mooss": loss.detach(), "mooss/grad_norm": grad_norm}
        if log:
            similarity = similarity.detach()
            own = torch.arange(len(similarity), device=self.device)
            self.metrics |= {"mooss/lr": self.aux_learning_rate(update), "mooss/mask_fraction": masks.float().mean(),
                             "mooss/top1_accuracy": (similarity.argmax(1) == own).float().mean(),
                             "mooss/rank_accuracy": rank_accuracy(similarity, args.seq_len, args.temporal_window)}
            self.last_mooss_step = (newest, masks[:args.seq_len], similarity)  # for the pictures

    def actor_step(self, obs, noise):
        """A step of actor and temperature; the losses' gradients stop at the critic, which is not theirs to move."""
        actor_loss, alpha_loss, entropy = self.actor_loss(obs, noise)
        self.optimizers["actor"].zero_grad()
        self.optimizers["alpha"].zero_grad()
        (actor_loss + alpha_loss).backward(inputs=[*self.actor.parameters(), self.log_alpha])
        self.optimizers["actor"].step()
        self.optimizers["alpha"].step()
        self.metrics |= {"losses/actor": actor_loss.detach(), "losses/alpha": alpha_loss.detach(),
                         "sac/entropy": entropy.detach(), "sac/alpha": self.log_alpha.detach().exp()}

    def update_targets(self, update):
        """Move the target critic and the key encoder towards the networks they follow."""
        args = self.args
        if update % args.critic_target_update_freq == 0:
            ema_update(self.critic_target.heads, self.critic.heads, args.critic_ema)
            ema_update(self.critic_target.encoder, self.critic.encoder, args.critic_encoder_ema)
        if args.aux_weight > 0 and update % args.target_update_period == 0:  # D8
            ema_update(self.key_encoder, self.critic.encoder, args.target_ema)


# The agent of a checkpoint file, and its step: `agent, step = load_agent(path)`.
load_agent = functools.partial(common.load_agent, SCRIPT, Args, Agent)


# ------------------------------------------------------------------------------------------------- evaluation
def evaluate(agent, args, device, step, video=None):
    """Deterministic episodes in an environment of their own (D13), seeds derived from (seed, step): a list of (return,
    length in agent steps)."""
    env, episodes, frames = make_env(args, device), [], []
    for episode in range(args.eval_episodes):
        obs, _ = env.reset(seed=common.derive_seed(args.seed, "evaluation", step, episode))
        score, length, done = 0.0, 0, False
        while not done:
            if video and episode == 0:
                frames.append(obs[-1].transpose(1, 2, 0))
            obs, reward, terminated, truncated, _ = env.step(agent.act(obs, deterministic=True))
            score, length, done = score + float(reward), length + 1, terminated or truncated
        episodes.append((score, length))
    env.close()
    if video:
        common.write_video(video, frames)
    return episodes


# ------------------------------------------------------------------------------------------------- main
def main(args):
    args = resolve_args(args)
    if args.eval_only:
        return common.evaluate_only(args, load_agent, evaluate)
    folder = common.RunFolder(args)
    folder.check()
    device = common.pick_device(args.device)
    common.configure_torch(args.seed, device, args.torch_deterministic)
    env = make_env(args, device)
    obs_shape, action_dim = env.observation_space.shape, env.action_space.shape[0]
    replay = common.place_replay(args.replay_device, device, functools.partial(
        SequenceReplay, args.buffer_size, obs_shape[1:], action_dim, args.frame_stack,
        common.derive_seed(args.seed, "replay")))
    agent = Agent(args, obs_shape, action_dim, device)
    run_dir = folder.claim()
    common.print_banner(args, run_dir, device, replay, PAPER)

    agent_step, update, episode, last_eval, actions = 0, 0, 0, None, []
    state = common.resume(run_dir, SCRIPT, args, agent, replay) if args.resume else None
    if state is not None:
        agent_step, update, episode = state["agent_step"], state["update"], state["episode"]
        last_eval, actions = state["last_eval"], list(state["actions"].numpy())
    logger = common.RunLogger(run_dir, args, METRICS, state)
    progress, stop = common.Progress(args.total_timesteps), common.StopRequest()

    def checkpoint():
        common.require_finite(agent.non_finite, step, run_dir)
        logger.mooss_pictures(step, agent.last_mooss_step, args.seq_len, args.pixel_scale)
        common.save_checkpoint(run_dir, SCRIPT, args, agent, replay, logger, dict(
            step=step, agent_step=agent_step, update=update, episode=episode, last_eval=last_eval,
            actions=torch.tensor(np.array(actions, np.float32)), agent_shape=(obs_shape, action_dim)))

    # An episode is its seed (D19) and its actions: to restore one that was half played, play it again.
    obs, _ = env.reset(seed=common.derive_seed(args.seed, "training", episode))
    episode_return = 0.0
    for action in actions:
        obs, reward, _, _, _ = env.step(action)
        episode_return += float(reward)
    if state is None:
        replay.add(obs[-1])

    while True:
        step = agent_step * args.action_repeat  # the x-axis of everything: environment steps
        finished = step >= args.total_timesteps
        if stop.signal or finished or common.due(step, args.checkpoint_every, args.action_repeat):
            checkpoint()
        if stop.signal:
            break
        if step != last_eval and (finished or common.due(step, args.eval_every, args.action_repeat, first=True)):
            video = run_dir / "videos" / f"step_{step:09d}.mp4" if args.capture_video else None
            episodes = evaluate(agent, args, device, step, video)
            logger.evaluation(step, update, episodes)
            progress.say(f"step {step:,}: evaluation return {common.mean_std([score for score, _ in episodes])}")
            last_eval = step
        if finished:
            checkpoint()
            break

        # Act, then update, then step the environment: on CUDA an update only queues kernels, and the simulator runs
        # while the GPU computes.
        if agent_step < args.init_steps:
            action = (2 * torch.rand(action_dim) - 1).numpy()
        else:
            action = agent.act(obs)
            log = update % args.log_every == 0
            agent.update(replay, update, log)
            update += 1
            if log:
                common.require_finite(agent.non_finite, step, run_dir)
                logger.train(step, update, agent.metrics)
            if device.type == "cpu" and args.preset == "paper":
                progress.warn_cpu(updates_left=(args.total_timesteps - step) // args.action_repeat)
        progress.show(step, update, agent.metrics)
        if not np.isfinite(action).all():  # a simulator would only crash
            common.require_finite(agent.non_finite, step, run_dir)

        obs, reward, terminated, truncated, _ = env.step(action)
        agent_step += 1
        actions.append(action)
        episode_return += float(reward)
        replay.add(obs[-1], action, float(reward), terminated)
        if terminated or truncated:
            agent.metrics["charts/episodic_return"] = episode_return
            logger.scalars(step, {"charts/episodic_return": episode_return})
            episode, actions, episode_return = episode + 1, [], 0.0
            obs, _ = env.reset(seed=common.derive_seed(args.seed, "training", episode))
            replay.add(obs[-1])

    for thing in (stop, logger, env):
        thing.close()
    return 128 + stop.signal if stop.signal else 0


if __name__ == "__main__":
    common.run_cli(Args, main)
