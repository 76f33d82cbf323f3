"""MOOSS on Atari-100k: Rainbow from pixels with a masked, ranked temporal contrastive loss beside it.

Paper: Sun et al., "MOOSS: Mask-Enhanced Temporal Contrastive Learning for Smooth State Evolution in Visual RL" (2025).
Numbers such as `D3` and `A1` point to the ledger of details in the README.

    python rainbow_mooss_atari.py --env-id Pong --seed 1                       # the paper's run: a GPU and some hours
    python rainbow_mooss_atari.py --env-id Pong --preset laptop --total-timesteps 15000   # two CPU cores: an hour
    python rainbow_mooss_atari.py --env-id Pong --aux-weight 0 --exp-name base # the paper's Base agent
    python rainbow_mooss_atari.py --env-id Pong --seed 1 --resume              # go on after a stop of any kind
    python rainbow_mooss_atari.py --eval-only --checkpoint runs/Pong__mooss__s1/checkpoint.pt
    tensorboard --logdir runs
"""

import os

# On some virtual CPUs oneDNN picks AMX for bf16 and the process dies; it reads this when torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import copy
import dataclasses
import functools
import json
import math
import re
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import mooss_common as common

SCRIPT = "rainbow_mooss_atari"  # what a checkpoint says it was written by


@dataclasses.dataclass
class Args:
    """Rainbow + MOOSS on Atari-100k. Unset flags take the paper's value for the game, unless --preset says else."""

    env_id: str = "Pong"  # game: Pong, ALE/Pong-v5 and PongNoFrameskip-v4 name the same one
    seed: int = 1  # of networks, environment, replay and masks
    exp_name: str = "mooss"  # name of the variant, part of the run folder's name
    run_root: str = "runs"  # folder that holds the run folders
    preset: Literal["paper", "laptop"] = "paper"  # the table / CPU sizes
    total_timesteps: int = 100_000  # length of the run (agent steps: the benchmark's interactions)
    eval_every: int = 0  # time between evaluations (agent steps); 0: only at the end, as the benchmark
    eval_episodes: int | None = None  # full games per evaluation (paper: 100)
    eval_epsilon: float = 0.001  # share of random actions when evaluating
    checkpoint_every: int = 5000  # time between checkpoints (agent steps); 0: only at the end and on a signal
    log_every: int = 100  # time between rows of train.csv (updates)
    resume: bool = False  # continue the run in its folder; begin it if there is none
    eval_only: bool = False  # evaluate --checkpoint, write eval_only.csv and a video beside it, and leave
    checkpoint: str | None = None  # checkpoint file for --eval-only
    capture_video: bool = False  # save an mp4 of the first game of every evaluation
    track: bool = False  # log to Weights & Biases too
    wandb_project: str = "mooss"  # W&B project
    wandb_entity: str | None = None  # W&B team or user
    wandb_group: str | None = None  # W&B group of runs
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    replay_device: Literal["auto", "cpu", "cuda"] = "auto"  # where the frames live; auto: on the GPU when they fit
    torch_deterministic: bool = False  # deterministic kernels on CUDA too (slower)
    compile: bool = False  # torch.compile the loss
    amp: Literal["none", "bf16"] = "none"  # networks in bfloat16; distributions, targets, logits stay fp32

    # Observations and replay

    gray_scale: bool = True  # grey frames; otherwise RGB
    frame_stack: int = 4  # frames in an observation
    image_size: int = 84  # side of an observation, H = W (pixels)
    action_repeat: int = 4  # frames per agent step
    max_frames: int = 108_000  # frames per game at most; counts as terminal
    noop_max: int = 30  # a game starts with 1 to this many no-ops
    augmentations: tuple[Literal["crop", "intensity"], ...] = ("crop", "intensity")  # in use
    crop_pad: int = 4  # crop: replicate this many pixels on each side, then take a random window (pixels)
    intensity_scale: float = 0.05  # intensity multiplies an observation by 1 + scale * clip(N(0,1), -2, 2)
    buffer_size: int = 100_000  # steps kept in the replay (agent steps)
    min_replay: int = 2000  # random actions before learning starts (agent steps)
    reward_clip: float = 1.0  # rewards are clipped to [-this, this]; 0: as they are
    priority_exponent: float = 0.5  # priorities are raised to this
    priority_correction: tuple[float, float] = (0.4, 1.0)  # importance exponent at --min-replay and at the end

    # Rainbow

    batch_size: int | None = None  # sequences per batch; the RL loss uses their first step (paper: 32)
    optimizer: Literal["adam", "adamw"] = "adam"  # optimiser of every module
    learning_rate: float = 1e-4  # of every module
    beta1: float = 0.9  # Adam beta_1
    beta2: float = 0.999  # Adam beta_2
    adam_eps: float = 1.5e-4  # Adam epsilon of encoder and Q head
    max_grad_norm: float = 10.0  # gradient norm limit, of encoder and Q head and of the MOOSS modules apart
    gamma: float = 0.99  # discount factor
    multi_step: int = 10  # length n of a return (agent steps)
    distributional: bool = True  # C51; otherwise expected values with a Huber loss
    num_atoms: int = 51  # atoms of the distribution
    v_min: float = -10.0  # lowest atom
    v_max: float = 10.0  # highest atom
    dueling: bool = True  # value and advantage streams; otherwise one
    noisy: bool = True  # explore by noisy layers; otherwise epsilon-greedy
    noisy_std: float = 0.5  # initial noise sigma_0 (A4)
    epsilon: float = 0.1  # share of random actions in training with --no-noisy
    replay_period: int = 1  # agent steps between learning
    updates_per_step: int = 2  # updates each time
    channels: tuple[int, ...] = (32, 64, 64)  # filters of the conv layers
    filter_sizes: tuple[int, ...] = (8, 4, 3)  # their kernel sizes
    strides: tuple[int, ...] = (4, 2, 1)  # their strides
    hidden_units: int = 256  # hidden units of the Q head
    target_update_period: int = 1  # time between updates of Q target and key encoder (updates)
    target_ema: float = 0.0  # their EMA m; 0: plain copies

    # MOOSS

    aux_weight: float = 0.1  # weight lambda of the MOOSS loss; 0 is the paper's Base
    aux_is_weights: bool = True  # importance weights on the MOOSS loss too, per sequence (A5)
    aux_adam_eps: float = 1.5e-4  # Adam epsilon of the MOOSS modules (A6)
    state_dim: int = 64  # dimension d of the state that MOOSS sees (A1)
    seq_len: int = 16  # sequence length F (agent steps)
    cube_size: int = 7  # spatial size of a cube, h = w (pixels)
    cube_len: int = 4  # temporal length f of a cube (agent steps)
    mask_type: Literal["walk", "cube"] = "walk"  # random walk on the cube graph, or uniform as in MLR
    mask_ratio: float | None = None  # share p_m of the cubes that is zeroed (paper: 0.1 for five games, else 0.5)
    walk_connectivity: Literal[26, 6] = 26  # neighbours of an inner cube (D4)
    walk_root: Literal["random", "fixed"] = "random"  # start of the walk (D5)
    share_mask: bool = False  # one mask for the whole batch (D6)
    crop_per_sequence: bool = False  # one crop for a whole sequence, not one per observation (D10)
    decoder_inputs: Literal["none", "s", "sa", "sar"] = "sa"  # tokens: states, actions, rewards; none: MLP head alone
    decoder_depth: int = 2  # Transformer blocks of g_phi
    decoder_heads: int = 4  # attention heads
    head_dim: int = 100  # hidden units of the decoder's MLP head
    temporal_window: int | None = None  # temporal window L (D1; paper: 2 for five games, else 6)
    tau0: float = 0.07  # contrastive temperature tau_0
    tau_step: float = 0.075  # contrastive temperature step tau_{l+1} - tau_l
    level_reduction: Literal["mean", "sum"] = "mean"  # how the levels of a query combine (D2)
    normalize_embeddings: bool = True  # L2-normalise queries and keys before W (D3)


PAPER = dict(eval_episodes=100, batch_size=32, mask_ratio=0.5, temporal_window=6)
PRESETS = {
    "paper": {},
    "laptop": dict(eval_episodes=20, batch_size=16),
}
TASK_PRESETS = {game: dict(mask_ratio=0.1, temporal_window=2)
                for game in ("Gopher", "Kangaroo", "MsPacman", "Pong", "Seaquest")}


def resolve_args(args):
    """Fill what is unset (explicit flag > preset > game > paper) and refuse values that cannot work."""
    env_id = re.sub(r"(NoFrameskip|Deterministic)?-v\d+$", "", args.env_id.removeprefix("ALE/"))
    values = {**PAPER, **TASK_PRESETS.get(env_id, {}), **PRESETS[args.preset]}
    args = dataclasses.replace(args, env_id=env_id, **{k: v for k, v in values.items() if getattr(args, k) is None})
    common.require_name("--env-id", env_id)
    common.require_name("--exp-name", args.exp_name)
    ahead = max(args.seq_len - 1, args.multi_step)  # rows that must follow a start
    below_one = (0.0, 0.999999)
    common.check_numbers(  # an int is at least 1 and a float lies in [0, 1], except
        args, seed=(0, 2**32 - 1), checkpoint_every=(0, math.inf), eval_every=(0, math.inf), frame_stack=(1, 16),
        image_size=(1, 210), noop_max=(0, 1000), crop_pad=(0, 210), reward_clip=(0, 1e9), beta1=below_one,
        beta2=below_one, max_grad_norm=(1e-6, math.inf), num_atoms=(2, 10_001), v_min=(-1e9, args.v_max),
        v_max=(args.v_min, 1e9), noisy_std=(0.0, 100.0), aux_weight=(0.0, 1e3), cube_size=(1, args.image_size),
        cube_len=(1, args.seq_len), decoder_heads=(1, args.state_dim), temporal_window=(0, args.seq_len - 1),
        tau0=(1e-3, 1e3), tau_step=(0, 1e3), min_replay=(ahead + 1, math.inf),
        buffer_size=(ahead + args.frame_stack + 1, 10**8))
    for whole, part in (("image_size", "cube_size"), ("seq_len", "cube_len"), ("state_dim", "decoder_heads")):
        a, b = getattr(args, whole), getattr(args, part)
        common.require(a % b == 0, f"--{part} {b} does not divide --{whole} {a}".replace("_", "-"))
    common.require(args.v_min < args.v_max, f"--v-min {args.v_min} is not below --v-max {args.v_max}")
    common.require(all(0 <= x <= 1 for x in args.priority_correction), "--priority-correction needs shares in [0, 1]")
    layers = (args.channels, args.filter_sizes, args.strides)
    common.require(len(set(map(len, layers))) == 1 and args.channels and min(min(layer) for layer in layers) >= 1,
                   "--channels, --filter-sizes and --strides need the same number of values, each at least 1")
    common.require(feature_side(args) >= 1, f"--image-size {args.image_size} is too small for these conv layers")
    common.require(args.checkpoint is not None or not args.eval_only, "--eval-only needs --checkpoint PATH")
    return args


def feature_side(args):
    """Side of the conv features: 7 for the paper's layers on 84x84."""
    side = args.image_size
    for size, stride in zip(args.filter_sizes, args.strides):
        side = (side - size) // stride + 1 if side >= size else 0
    return side


# ------------------------------------------------------------------------------------------------- environment
class LifeEpisodes(gym.Wrapper):
    """Losing a life ends the learning episode while the game goes on: a reset without a seed is then one no-op step,
    not a new game. `info["game_over"]` tells the two kinds of ends apart; the frame limit counts as terminal."""

    def reset(self, *, seed=None, options=None):
        game_over = True
        if seed is None:  # the game goes on
            obs, _, terminated, truncated, info = self.env.step(0)
            game_over = terminated or truncated
        if game_over:
            obs, info = self.env.reset(seed=seed, options=options)
        self.lives = self.env.unwrapped.ale.lives()
        return obs, info

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        game_over, lives = terminated or truncated, self.env.unwrapped.ale.lives()
        life_lost, self.lives = 0 < lives < self.lives, lives
        return obs, reward, game_over or life_lost, False, {**info, "game_over": game_over}


def make_env(args, device, training=True):
    """A game with observations (frame_stack, C, H, W), zeros before an episode's first frame. `device` is not used:
    games render on the CPU."""
    import ale_py

    gym.register_envs(ale_py)
    games = [name[4:-3] for name in gym.registry if re.fullmatch(r"ALE/\w+-v5", name)]
    common.require_known("--env-id", args.env_id, games)
    env = gym.make(f"ALE/{args.env_id}-v5", frameskip=1, repeat_action_probability=0.0, disable_env_checker=True,
                   max_num_frames_per_episode=args.max_frames)
    common.require(env.unwrapped.get_action_meanings()[0] == "NOOP", f"--env-id {args.env_id} has no no-op action")
    env = gym.wrappers.AtariPreprocessing(env, noop_max=args.noop_max, frame_skip=args.action_repeat,
                                          screen_size=args.image_size, grayscale_obs=args.gray_scale,
                                          grayscale_newaxis=True)  # max over the last two frames, area resize: A7
    if training:
        env = LifeEpisodes(env)
    space = gym.spaces.Box(0, 255, (1 if args.gray_scale else 3, args.image_size, args.image_size), np.uint8)
    env = gym.wrappers.TransformObservation(env, lambda frame: frame.transpose(2, 0, 1), space)
    return gym.wrappers.FrameStackObservation(env, args.frame_stack, padding_type="zero")


# ------------------------------------------------------------------------------------------------- replay
class SumTree:
    """Priorities as leaves of a binary tree of sums; reads and writes of a whole batch walk its levels together."""

    def __init__(self, capacity, device):
        self.levels = max(1, math.ceil(math.log2(capacity)))
        self.leaves = 2**self.levels
        self.sums = torch.zeros(2 * self.leaves, dtype=torch.float64, device=device)  # node i has children 2i, 2i+1

    def write(self, slots, values):
        node = slots + self.leaves
        self.sums[node] = values
        for _ in range(self.levels):
            node = node // 2
            self.sums[node] = self.sums[2 * node] + self.sums[2 * node + 1]

    def sample(self, count):
        """Slots (count,) drawn in proportion to their priorities, and their probabilities."""
        left = torch.rand(count, dtype=torch.float64, device=self.sums.device) * self.sums[1]  # mass still to the left
        node = torch.ones(count, dtype=torch.long, device=self.sums.device)
        for _ in range(self.levels):
            first, second = self.sums[2 * node], self.sums[2 * node + 1]
            right = (left >= first) & (second > 0)  # rounding must not lead into an empty branch
            left, node = left - first * right, 2 * node + right
        return node - self.leaves, self.sums[node] / self.sums[1]


class SequenceReplay:
    """Every frame once, as uint8; stacks, n-step returns and sequences are gathered by index, starts by priority.

    A row is one agent step: the newest frame before it, its action, reward, and whether it ended the episode. Rows are
    numbered from the start of the run; row r lives in slot r % capacity. A row can be drawn once the rows that its
    return and its sequence need have followed, and until the frames of its stack are overwritten.
    """

    columns = ("frames", "actions", "rewards", "terminals", "first_rows")  # what a row holds

    def __init__(self, capacity, frame_shape, frame_stack, seq_len, multi_step, device):
        self.capacity, self.frame_stack, self.seq_len, self.multi_step = capacity, frame_stack, seq_len, multi_step
        self.device, self.ahead = device, max(seq_len - 1, multi_step)
        self.frames = torch.zeros(capacity, *frame_shape, dtype=torch.uint8, device=device)
        self.actions = torch.zeros(capacity, dtype=torch.long, device=device)
        self.rewards = torch.zeros(capacity, device=device)
        self.terminals = torch.zeros(capacity, dtype=torch.bool, device=device)
        self.first_rows = torch.zeros(capacity, dtype=torch.long, device=device)  # first row of the row's episode
        self.priorities = SumTree(capacity, device)
        self.rows, self.first_row = 0, 0
        self.saved_pieces, self.saved_at = [], None  # what this run's last checkpoint holds (mooss_common)

    def add(self, frame, action, reward, terminal):
        row, slot = self.rows, self.rows % self.capacity
        self.frames[slot] = torch.as_tensor(frame)
        self.actions[slot] = int(action)
        self.rewards[slot] = reward
        self.terminals[slot] = terminal
        self.first_rows[slot] = self.first_row
        self.rows = row + 1
        if terminal:
            self.first_row = self.rows
        oldest = self.rows - self.capacity  # once rows are overwritten, the next oldest lose frames of their stacks
        closed = [slot] + [r % self.capacity for r in range(oldest, oldest + self.frame_stack - 1) if oldest > 0]
        ripe = row - self.ahead  # this row now has all the rows it needs behind it
        slots = torch.tensor([*closed, *([ripe % self.capacity] if ripe >= 0 else [])])
        values = torch.zeros(len(slots), dtype=torch.float64)
        values[len(closed):] = 1.0  # the initial priority
        self.priorities.write(slots.to(self.device), values.to(self.device))

    def sample(self, count, beta):
        """Rows (count,) by priority, and their importance weights (N p)^-beta, divided by the batch maximum."""
        slots, probability = self.priorities.sample(count)
        newest = self.rows - 1
        return newest - (newest - slots) % self.capacity, ((probability.min() / probability) ** beta).float()

    def set_priorities(self, rows, priorities, exponent):
        self.priorities.write(rows % self.capacity, priorities.double().clamp(1e-6, 1e6) ** exponent)

    def returns(self, rows, gamma):
        """n-step returns (B,), cut at a terminal (A2), and whether the state n steps on still counts (B,)."""
        slots = (rows[:, None] + torch.arange(self.multi_step, device=self.device)) % self.capacity  # (B, n)
        going = (~self.terminals[slots]).float().cumprod(1)
        before = torch.cat([torch.ones_like(going[:, :1]), going[:, :-1]], dim=1)  # no terminal before this step
        discount = gamma ** torch.arange(self.multi_step, device=self.device)
        return (self.rewards[slots] * discount * before).sum(1), going[:, -1]

    def sequences(self, rows):
        """Actions (B, F), rewards (B, F), and which steps belong to the first step's episode (B, F) (A3)."""
        slots = (rows[:, None] + torch.arange(self.seq_len, device=self.device)) % self.capacity
        return self.actions[slots], self.rewards[slots], self.first_rows[slots] == self.first_rows[slots[:, :1]]

    def frames_for(self, rows, length):
        """Frames of the `length` observations from each row on, oldest first: (B, frame_stack - 1 + length, C, H, W).

        Those before the first frame of the row's episode are zero.
        """
        needed = rows[:, None] + torch.arange(1 - self.frame_stack, length, device=self.device)
        frames = self.frames.index_select(0, needed.flatten() % self.capacity).unflatten(0, needed.shape)
        exists = needed >= self.first_rows[rows % self.capacity][:, None]
        return frames * exists[..., None, None, None]

    def state_dict(self):
        return {"priorities": self.priorities.sums.cpu(), "rows": self.rows, "first_row": self.first_row}

    def load_state_dict(self, state):
        self.priorities.sums.copy_(state["priorities"])
        self.rows, self.first_row = state["rows"], state["first_row"]


# ------------------------------------------------------------------------------------------------- augmentation
def stack_frames(frames, args):
    """Frames of sequences (B, frame_stack - 1 + F, C, H, W) to stacks (B, F, H', W', frame_stack * C), replicated at
    their borders for the crops to come."""
    frames, length = frames.permute(0, 1, 3, 4, 2), frames.shape[1] - args.frame_stack + 1
    pad = args.crop_pad if "crop" in args.augmentations else 0
    for side in (2, 3):
        first, last = frames.narrow(side, 0, 1), frames.narrow(side, -1, 1)
        frames = torch.cat([*[first] * pad, frames, *[last] * pad], dim=side)
    return torch.cat([frames[:, k:k + length] for k in range(args.frame_stack)], dim=4)


def as_words(pixels):
    """The bytes of a pixel as 32-bit numbers where they fill them: to move and mask them is then four times faster."""
    return pixels.view(torch.int32 if pixels.shape[-1] % 4 == 0 else torch.uint8)


def random_crop(stacks, args):
    """A window of each stack, drawn anew at each call: (B * F, H, W, channels), uint8.

    A view of all windows of all stacks costs nothing, and indexing it copies only the pixels that are used.
    """
    windows = as_words(stacks).unfold(2, args.image_size, 1).unfold(3, args.image_size, 1).movedim(4, 6)
    batch, length, offsets = windows.shape[:3]
    drawn = (batch, 1) if args.crop_per_sequence else (batch, length)  # D10
    top, left = torch.randint(offsets, (2, *drawn), device=stacks.device)
    which = torch.arange(batch, device=stacks.device)[:, None], torch.arange(length, device=stacks.device)
    return windows[(*which, top, left)].flatten(0, 1).view(torch.uint8)


def random_intensity(pixels, args, out=None):
    """Pixels (N, H, W, channels) as floats in [0, 1] (A8), each observation randomly bright: (N, channels, H, W).

    Large batches go into memory that is kept (`out`): on a CPU, fresh pages cost more than the pixels that fill them.
    """
    out = torch.empty_like(pixels, dtype=torch.float32) if out is None else out
    scale = torch.full((len(pixels), 1, 1, 1), 1 / 255, device=pixels.device)
    if "intensity" in args.augmentations:
        scale = scale * (1 + args.intensity_scale * torch.randn_like(scale).clamp(-2, 2))
    return out.copy_(pixels).mul_(scale).permute(0, 3, 1, 2)


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
class NoisyLinear(nn.Linear):
    """Linear layer with factorised Gaussian noise: the noise of the weights is an outer product, so of rank one.

    Means start as torch starts them, uniform on +-1/sqrt(inputs). Without `std` it is an ordinary layer.
    """

    def __init__(self, inputs, outputs, std=None):
        super().__init__(inputs, outputs)
        self.has_noise = std is not None
        if self.has_noise:
            self.weight_sigma = nn.Parameter(torch.full((outputs, inputs), std / math.sqrt(inputs)))
            self.bias_sigma = nn.Parameter(torch.full((outputs,), std / math.sqrt(outputs)))
            self.register_buffer("noise_in", torch.zeros(inputs))
            self.register_buffer("noise_out", torch.zeros(outputs))

    def draw_noise(self):
        for noise in (self.noise_in, self.noise_out):
            noise.normal_()
            noise.copy_(noise.sign() * noise.abs().sqrt())

    def forward(self, x, noisy=True):
        out = F.linear(x, self.weight, self.bias)
        if noisy and self.has_noise:  # (sigma * outer(noise_out, noise_in)) x, without building that matrix
            out = out + self.noise_out * F.linear(x * self.noise_in, self.weight_sigma, self.bias_sigma)
        return out


class Stream(nn.Module):
    """Two layers of the Q head with a ReLU between."""

    def __init__(self, inputs, outputs, args):
        super().__init__()
        std = args.noisy_std if args.noisy else None  # A4
        self.first = NoisyLinear(inputs, args.hidden_units, std)
        self.second = NoisyLinear(args.hidden_units, outputs, std)

    def forward(self, x, noisy):
        return self.second(F.relu(self.first(x, noisy)), noisy)


class Network(nn.Module):
    """Encoder, Q head and (for MOOSS) the projection to a state; Q target and key encoder are one copy of it."""

    def __init__(self, args, channels, num_actions):
        super().__init__()
        layers = []
        for filters, size, stride in zip(args.channels, args.filter_sizes, args.strides):
            layers += [nn.Conv2d(channels, filters, size, stride), nn.ReLU(inplace=True)]
            channels = filters
        self.convs = nn.Sequential(*layers, nn.Flatten())
        features = channels * feature_side(args) ** 2
        self.num_actions, self.atoms = num_actions, args.num_atoms if args.distributional else 1
        self.advantage = Stream(features, num_actions * self.atoms, args)
        self.value = Stream(features, self.atoms, args) if args.dueling else None
        if args.aux_weight > 0:
            self.projection = nn.Sequential(nn.Linear(features, args.state_dim), nn.LayerNorm(args.state_dim))  # A1

    def features(self, obs):
        """Conv features, each sample rescaled to [0, 1]: (B, features)."""
        x = self.convs(obs).float()
        low, high = x.min(1, keepdim=True).values, x.max(1, keepdim=True).values
        return (x - low) * (1 / (high - low).clamp(min=1e-5))

    def state(self, obs):
        return self.projection(self.features(obs))

    def forward(self, obs, noisy=True):
        """Logits over atoms (B, actions, atoms), or Q values with one atom."""
        x = self.features(obs)
        x = x + (math.sqrt(0.5) - 1) * (x - x.detach())  # the value is x, the gradient is scaled by 1/sqrt(2)
        out = self.advantage(x, noisy).view(-1, self.num_actions, self.atoms).float()
        if self.value is not None:
            out = out - out.mean(1, keepdim=True) + self.value(x, noisy).view(-1, 1, self.atoms).float()
        return out

    def draw_noise(self):
        for module in self.modules():
            if isinstance(module, NoisyLinear) and module.has_noise:
                module.draw_noise()


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


def project_distribution(probabilities, rewards, discounts, support):
    """C51: the distribution (B, atoms) of reward + discount * Z, its mass split between neighbours of the support."""
    low, high, gap = support[0], support[-1], support[1] - support[0]
    moved = (rewards[:, None] + discounts[:, None] * support).clamp(low, high)  # (B, atoms)
    share = (1 - (moved[:, None, :] - support[:, None]).abs() / gap).clamp(min=0)  # (B, to, from)
    return (share * probabilities[:, None, :]).sum(2)


# ------------------------------------------------------------------------------------------------- agent
METRICS = ("charts/episodic_return", "charts/learning_rate", "losses/rl", "losses/mooss", "rainbow/q",
           "rainbow/priority", "rainbow/is_exponent", "rainbow/grad_norm", "mooss/grad_norm", "mooss/mask_fraction",
           "mooss/valid_fraction", "mooss/top1_accuracy", "mooss/rank_accuracy", "encoder/state_std",
           "encoder/dead_features")


class Agent(nn.Module):
    """Networks, optimiser and the losses. Losses map tensors to tensors, so that they compile."""

    def __init__(self, args, obs_shape, num_actions, device):
        super().__init__()
        self.args, self.device, self.num_actions, self.frame_channels = args, device, num_actions, obs_shape[1]
        self.online = Network(args, obs_shape[0] * obs_shape[1], num_actions)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.register_buffer("support", torch.linspace(args.v_min, args.v_max, args.num_atoms), persistent=False)
        if args.aux_weight > 0:
            self.decoder = PredictiveDecoder(args.state_dim, num_actions, args.decoder_depth, args.decoder_heads,
                                             args.head_dim, args.decoder_inputs)
            self.bilinear = nn.Parameter(torch.rand(args.state_dim, args.state_dim))  # W of sim(q, k) = q W k
            self.masks = MaskBank(args, args.batch_size, device)
            self.obs_buffer = torch.zeros(args.batch_size * args.seq_len, args.image_size, args.image_size,
                                          obs_shape[0] * obs_shape[1], device=device)
        self.to(device, memory_format=torch.channels_last)
        mooss = ("online.projection.", "decoder.", "bilinear")
        trained = [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]
        self.rl_parameters = [parameter for name, parameter in trained if not name.startswith(mooss)]
        self.aux_parameters = [parameter for name, parameter in trained if name.startswith(mooss)]
        groups = [{"params": self.rl_parameters, "eps": args.adam_eps}]
        if self.aux_parameters:
            groups.append({"params": self.aux_parameters, "eps": args.aux_adam_eps})  # A6
        adam = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[args.optimizer]
        self.optimizers = {"all": adam(groups, lr=args.learning_rate, betas=(args.beta1, args.beta2), fused=True)}
        for name in ("rl_loss", "key_states", "mooss_loss"):
            setattr(self, name, common.maybe_compile(getattr(self, name), args.compile, device))
        self.metrics, self.non_finite, self.last_mooss_step = {}, {}, None

    def autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.args.amp == "bf16")

    def q_values(self, out):
        """Expected values (B, actions) of a network's output."""
        return (out.softmax(2) * self.support).sum(2) if self.args.distributional else out[..., 0]

    @torch.no_grad()
    def act(self, obs, noisy=False):
        """Greedy actions (N,) for observations (N, frame_stack, C, H, W) uint8."""
        obs = torch.as_tensor(obs, device=self.device).flatten(1, 2).float() / 255
        with self.autocast():
            out = self.online(obs.contiguous(memory_format=torch.channels_last), noisy)
        return self.q_values(out).argmax(1).cpu().numpy()

    def rl_loss(self, obs, actions, returns, discounts, next_obs, next_obs_target):
        """Double DQN on n-step returns: a loss and a priority for each sample (B,), and the mean Q value.

        With C51 the loss is the cross entropy and the priority KL(target || prediction); without, both come from the
        TD error.
        """
        batch = torch.arange(len(obs), device=obs.device)
        with torch.no_grad(), self.autocast():
            next_actions = self.q_values(self.online(next_obs)).argmax(1)
            next_out = self.target(next_obs_target)[batch, next_actions]  # (B, atoms)
        with self.autocast():
            out = self.online(obs)
        chosen = out[batch, actions]
        if self.args.distributional:
            target = project_distribution(next_out.softmax(1), returns, discounts, self.support)
            losses = -(target * chosen.log_softmax(1)).sum(1)
            entropy = -torch.special.xlogy(target, target).sum(1)
            priorities = losses.detach() - entropy
        else:
            target = returns + discounts * next_out[:, 0]
            losses = F.smooth_l1_loss(chosen[:, 0], target, reduction="none")
            priorities = (chosen[:, 0].detach() - target).abs()
        return losses, priorities, self.q_values(out.detach()).mean()

    def key_states(self, obs):
        with torch.no_grad(), self.autocast():
            return self.target.state(obs).float(),  # (B*F, d)

    def mooss_loss(self, masked_obs, keys, actions, rewards, valid, weights):
        """L_MOOSS of a batch of sequences, and the similarity matrix (B*F, B*F) it ranks."""
        args = self.args
        with self.autocast():
            states = self.online.state(masked_obs).view(-1, args.seq_len, args.state_dim)
            queries = self.decoder(states, actions, rewards).flatten(0, 1).float()
        if args.normalize_embeddings:  # D3
            queries, keys = F.normalize(queries, dim=1, eps=1e-3), F.normalize(keys, dim=1, eps=1e-3)
        similarity = queries @ self.bilinear @ keys.T  # (B*F, B*F)
        loss = temporal_contrastive_loss(similarity, args.seq_len, args.temporal_window, args.tau0, args.tau_step,
                                         args.level_reduction, weights, valid)
        return loss, similarity

    @torch.no_grad()
    def encoder_metrics(self, obs):
        """How far states of a batch differ from each other (Base has no states: its features), and which share of
        conv features is zero on all of it."""
        with self.autocast():
            features = self.online.features(obs)
            states = self.online.projection(features) if self.args.aux_weight > 0 else features
            convs = self.online.convs(obs)
        return {"encoder/state_std": states.std(0).mean(),
                "encoder/dead_features": (convs == 0).all(0).float().mean()}

    def update(self, replay, update, beta, log):
        """One update: RL on the first step of each sequence, MOOSS on all of them, one backward, target copy. With
        the replay on the same device, nothing here waits for it."""
        args, metrics = self.args, self.metrics
        if args.compile and self.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        self.online.draw_noise()
        rows, weights = replay.sample(args.batch_size, beta)
        returns, going = replay.returns(rows, args.gamma)
        actions, rewards, valid = replay.sequences(rows)
        weights, returns, going, actions, rewards, valid = (
            x.to(self.device, non_blocking=True) for x in (weights, returns, going, actions, rewards, valid))
        frames = replay.frames_for(rows, args.seq_len if args.aux_weight > 0 else 1)
        stacks, next_stacks = (stack_frames(x.to(self.device, non_blocking=True), args)
                               for x in (frames, replay.frames_for(rows + args.multi_step, 1)))
        obs, next_obs, next_obs_target = (random_intensity(random_crop(x, args), args)
                                          for x in (stacks[:, :1], next_stacks, next_stacks))
        discounts = going * args.gamma**args.multi_step
        losses, priorities, q = self.rl_loss(obs, actions[:, 0], returns, discounts, next_obs, next_obs_target)
        loss = (weights * losses).mean()
        metrics |= {"losses/rl": loss.detach(), "rainbow/q": q, "rainbow/priority": priorities.mean(),
                    "rainbow/is_exponent": beta, "charts/learning_rate": args.learning_rate}
        if log:
            metrics |= self.encoder_metrics(obs)
        if args.aux_weight > 0:
            keys, = self.key_states(random_intensity(random_crop(stacks, args), args, self.obs_buffer))
            pixels, masks = random_crop(stacks, args), self.masks(update)
            newest = pixels[:args.seq_len, ..., -self.frame_channels:].permute(0, 3, 1, 2).clone() if log else None
            as_words(pixels).mul_((~masks).permute(0, 2, 3, 1))
            obs = random_intensity(pixels, args, self.obs_buffer)  # in the keys' memory, which is free again
            one_hot = (actions[..., None] == torch.arange(self.num_actions, device=self.device)).float()
            mooss, similarity = self.mooss_loss(obs, keys, one_hot, rewards[..., None], valid,
                                                weights if args.aux_is_weights else torch.ones_like(weights))  # A5
            loss = loss + args.aux_weight * mooss
            metrics["losses/mooss"] = mooss.detach()
        self.optimizers["all"].zero_grad()
        loss.backward()
        metrics["rainbow/grad_norm"] = nn.utils.clip_grad_norm_(self.rl_parameters, args.max_grad_norm)
        if args.aux_weight > 0:
            metrics["mooss/grad_norm"] = nn.utils.clip_grad_norm_(self.aux_parameters, args.max_grad_norm)
        self.optimizers["all"].step()
        common.flag_non_finite(self.non_finite, metrics)
        replay.set_priorities(rows, priorities.to(replay.device), args.priority_exponent)
        if update % args.target_update_period == 0:
            ema_update(self.target, self.online, args.target_ema)
            for copied, buffer in zip(self.target.buffers(), self.online.buffers()):  # the noise goes with the copy
                copied.copy_(buffer)
        if args.aux_weight > 0 and log:
            similarity = similarity.detach()
            best = similarity.masked_fill(~valid.flatten(), -math.inf).argmax(1)
            own = (best == torch.arange(len(best), device=self.device)) & valid.flatten()
            metrics |= {"mooss/mask_fraction": masks.float().mean(),
                        "mooss/valid_fraction": valid.float().mean(), "mooss/top1_accuracy": own.sum() / valid.sum(),
                        "mooss/rank_accuracy": rank_accuracy(similarity, args.seq_len, args.temporal_window, valid)}
            self.last_mooss_step = (newest, masks[:args.seq_len], similarity)  # for the pictures


# The agent of a checkpoint file, and its step: `agent, step = load_agent(path)`.
load_agent = functools.partial(common.load_agent, SCRIPT, Args, Agent)


# ------------------------------------------------------------------------------------------------- evaluation
def evaluate(agent, args, device, step, video=None):
    """Full games, unclipped, without noise, all at once, their seeds derived from (seed, step): a list of (score,
    length in agent steps)."""
    count = args.eval_episodes
    seeds = [common.derive_seed(args.seed, "evaluation", step, game) for game in range(count)]
    envs = [make_env(args, device, training=False) for _ in range(count)]
    dice = [np.random.default_rng(seed) for seed in seeds]
    obs = [env.reset(seed=seed)[0] for env, seed in zip(envs, seeds)]
    scores, lengths, frames, playing = [0.0] * count, [0] * count, [], list(range(count))
    while playing:
        for game, action in zip(playing, agent.act(np.stack([obs[game] for game in playing]))):
            if video and game == 0:
                frames.append(np.broadcast_to(obs[0][-1].transpose(1, 2, 0), (args.image_size, args.image_size, 3)))
            if dice[game].random() < args.eval_epsilon:
                action = dice[game].integers(agent.num_actions)
            obs[game], reward, terminated, truncated, _ = envs[game].step(int(action))
            scores[game], lengths[game] = scores[game] + float(reward), lengths[game] + 1
            if terminated or truncated:
                envs[game].close()
                envs[game] = None
        playing = [game for game in playing if envs[game] is not None]
    if video:
        common.write_video(video, frames, fps=15)
    return list(zip(scores, lengths))


def verdict(args, episodes):
    """The score; for the games of the benchmark also human-normalised and beside the paper's."""
    scores = [score for score, _ in episodes]
    text, table = f"score {common.mean_std(scores)}", Path(__file__).parent / "benchmark" / "paper_scores.json"
    published = json.loads(table.read_text())["atari100k"] if table.exists() else {}
    if args.env_id in published:
        low, human, base, mooss = (published[args.env_id][name] for name in ("Random", "Human", "Base", "MOOSS"))
        text += (f"; human-normalised {(np.mean(scores) - low) / (human - low):.3f}; the paper's MOOSS {mooss}, "
                 f"Base {base}, random {low}, human {human}")
    return text


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
    obs_shape, num_actions = env.observation_space.shape, int(env.action_space.n)
    replay = common.place_replay(args.replay_device, device, functools.partial(
        SequenceReplay, args.buffer_size, obs_shape[1:], args.frame_stack, args.seq_len, args.multi_step))
    agent = Agent(args, obs_shape, num_actions, device)
    run_dir = folder.claim()
    common.print_banner(args, run_dir, device, replay, PAPER)

    step, update, game, last_eval, actions = 0, 0, 0, None, []
    state = common.resume(run_dir, SCRIPT, args, agent, replay) if args.resume else None
    if state is not None:
        step, update, game, last_eval = state["step"], state["update"], state["game"], state["last_eval"]
        actions = state["actions"].tolist()
    logger = common.RunLogger(run_dir, args, METRICS, state)
    progress, stop = common.Progress(args.total_timesteps), common.StopRequest()

    def checkpoint():
        common.require_finite(agent.non_finite, step, run_dir)
        logger.mooss_pictures(step, agent.last_mooss_step, args.seq_len, 1.0)
        common.save_checkpoint(run_dir, SCRIPT, args, agent, replay, logger, dict(
            step=step, update=update, game=game, last_eval=last_eval, actions=torch.tensor(actions, dtype=torch.long),
            agent_shape=(obs_shape, num_actions)))

    # A game is its seed and its actions: to restore one that was half played, play it again.
    obs, _ = env.reset(seed=common.derive_seed(args.seed, "training", game))
    score = 0.0
    for action in actions:
        obs, reward, terminated, _, _ = env.step(action)
        score += float(reward)
        if terminated:  # a life was lost
            obs, _ = env.reset()

    while True:
        finished = step >= args.total_timesteps
        if stop.signal or finished or common.due(step, args.checkpoint_every, 1):
            checkpoint()
        if stop.signal:
            break
        if step != last_eval and (finished or common.due(step, args.eval_every, 1, first=True)):
            video = run_dir / "videos" / f"step_{step:09d}.mp4" if args.capture_video else None
            episodes = evaluate(agent, args, device, step, video)
            logger.evaluation(step, update, episodes)
            progress.say(f"step {step:,}: {verdict(args, episodes)}")
            last_eval = step
        if finished:
            checkpoint()
            break

        # Act, then update, then step the environment: on CUDA an update only queues kernels, and the emulator runs
        # while the GPU computes.
        if step < args.min_replay or (not args.noisy and torch.rand(()) < args.epsilon):
            action = int(torch.randint(num_actions, ()))
        else:
            action = int(agent.act(obs[None], noisy=args.noisy)[0])
        if step >= args.min_replay and step % args.replay_period == 0:
            low, high = args.priority_correction
            beta = low + (high - low) * (step - args.min_replay) / (args.total_timesteps - args.min_replay)
            for _ in range(args.updates_per_step):
                log = update % args.log_every == 0
                agent.update(replay, update, beta, log)
                update += 1
                if log:
                    common.require_finite(agent.non_finite, step, run_dir)
                    logger.train(step, update, agent.metrics)
                if device.type == "cpu" and args.preset == "paper":
                    progress.warn_cpu((args.total_timesteps - step) * args.updates_per_step // args.replay_period)
        progress.show(step, update, agent.metrics)

        next_obs, reward, terminated, _, info = env.step(action)
        step += 1
        actions.append(action)
        score += float(reward)
        clipped = max(-args.reward_clip, min(args.reward_clip, float(reward))) if args.reward_clip else float(reward)
        replay.add(obs[-1], action, clipped, terminated)
        obs = next_obs
        if terminated:
            if info.get("game_over", True):
                agent.metrics["charts/episodic_return"] = score
                logger.scalars(step, {"charts/episodic_return": score})
                game, actions, score = game + 1, [], 0.0
                obs, _ = env.reset(seed=common.derive_seed(args.seed, "training", game))
            else:
                obs, _ = env.reset()

    for thing in (stop, logger, env):
        thing.close()
    return 128 + stop.signal if stop.signal else 0


if __name__ == "__main__":
    common.run_cli(Args, main)
