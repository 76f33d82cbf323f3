"""MOOSS on Atari-100k: Rainbow from pixels with a masked, ranked temporal contrastive loss beside
it. Paper: Sun et al., "MOOSS: Mask-Enhanced Temporal Contrastive Learning for Smooth State
Evolution in Visual Reinforcement Learning" (WACV 2025).

Marks such as `D3` and `A1` are rows of the ledger of details, benchmark/LEDGER.md.

    # two CPU cores, about an hour
    python rainbow_mooss_atari.py --env-id RoadRunner --preset laptop --total-timesteps 15000
    # the paper's run: a GPU and some hours
    python rainbow_mooss_atari.py --env-id Pong --seed 1
    # the paper's Base agent: the same without MOOSS
    python rainbow_mooss_atari.py --env-id Pong --aux-weight 0 --exp-name base
    # go on after a stop of any kind
    python rainbow_mooss_atari.py --env-id Pong --seed 1 --resume
    # evaluate a saved agent and film it
    python rainbow_mooss_atari.py --eval-only --checkpoint runs/Pong__mooss__s1/checkpoint.pt
    # watch a run
    tensorboard --logdir runs

Letters in the comments on shapes: B batch, F frames of a sequence, C channels of an observation (1
or 3 for each frame of its stack), H and W height and width, d dimension of a state, A number of
actions, n steps of a return, L temporal window.
"""

import os
import signal

# On some virtual CPUs oneDNN picks AMX for bf16 and the process dies; torch reads this on import.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
if __name__ == "__main__":  # Ctrl-C leaves quietly until `main` has something to save
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import concurrent.futures
import copy
import dataclasses
import math
import re
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import mooss_common as common


# --------------------------------------------------------------------------------------- arguments
@dataclasses.dataclass
class Args:
    """Rainbow + MOOSS on Atari-100k.

    None in the source: the preset's value, else the paper's for the game; --help shows it.
    """

    # game: Pong, ALE/Pong-v5 and PongNoFrameskip-v4 name the same one
    env_id: str = "Pong"
    seed: int = 1  # of networks, environment, replay and masks
    exp_name: str = "mooss"  # name of the variant, part of the run folder's name
    run_root: str = "runs"  # folder that holds the run folders
    preset: Literal["paper", "laptop"] = "paper"  # the paper's table, or sizes for a CPU
    total_timesteps: int = 100_000  # length of the run (agent steps, called interactions)
    eval_every: int = 0  # time between evaluations (agent steps); 0: only at the end
    eval_episodes: int = None  # full games per evaluation
    eval_epsilon: float = 0.001  # share of random actions when evaluating
    checkpoint_every: int = 5000  # time between checkpoints (agent steps); 0: only at the end
    log_every: int = 100  # time between rows of train.csv (updates)
    resume: bool = False  # continue the run in its folder; begin it if there is none
    eval_only: bool = False  # evaluate and film the agent of --checkpoint, and leave
    checkpoint: str | None = None  # checkpoint file for --eval-only
    capture_video: bool = False  # save an mp4 of the first game of every evaluation
    track: bool = False  # log to Weights & Biases too
    wandb_project: str = "mooss"  # W&B project
    wandb_entity: str | None = None  # W&B team or user
    wandb_group: str | None = None  # W&B group of runs
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    replay_device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: on the GPU when it fits
    torch_deterministic: bool = False  # deterministic kernels on CUDA too (slower)
    compile: bool = False  # torch.compile the loss
    amp: Literal["none", "bf16"] = "none"  # networks in bfloat16, losses in fp32

    # Observations and replay

    gray_scale: bool = True  # grey frames; otherwise RGB
    frame_stack: int = 4  # frames in an observation
    image_size: int = 84  # side of an observation, H = W (pixels)
    action_repeat: int = 4  # frames per agent step
    max_frames: int = 108_000  # frames per game at most; counts as terminal
    noop_max: int = 30  # a game starts with 1 to this many no-ops
    # random augmentations
    augmentations: tuple[Literal["crop", "intensity"], ...] = ("crop", "intensity")
    crop_pad: int = 4  # replicated on each side before a random window is taken (pixels)
    intensity_scale: float = 0.05  # observations times 1 + this * clip(N(0, 1), -2, 2)
    buffer_size: int = 100_000  # frames kept in the replay (agent steps, and ends of episodes)
    min_replay: int = 2000  # random actions before learning starts (agent steps)
    reward_clip: float = 1.0  # rewards are clipped to [-this, this]; 0: as they are
    priority_exponent: float = 0.5  # priorities are raised to this
    priority_correction: tuple[float, float] = (0.4, 1.0)  # importance exponent, first and last

    # Rainbow

    batch_size: int = None  # sequences per batch; the RL loss uses their first step
    optimizer: Literal["adam", "adamw"] = "adam"  # optimiser of every module
    learning_rate: float = 1e-4  # of every module
    beta1: float = 0.9  # Adam beta_1
    beta2: float = 0.999  # Adam beta_2
    adam_eps: float = 1.5e-4  # Adam epsilon of encoder and Q head
    max_grad_norm: float = 10.0  # gradient norm limit, one for Rainbow and one for MOOSS
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
    target_ema: float = 0.0  # EMA m of Q target and key encoder; 0: plain copies

    # MOOSS

    aux_weight: float = 0.1  # weight lambda of the MOOSS loss; 0 is the paper's Base
    aux_is_weights: bool = True  # importance weights on the MOOSS loss too (A5)
    aux_adam_eps: float = 1.5e-4  # Adam epsilon of the MOOSS modules (A6)
    state_dim: int = 64  # dimension d of the state that MOOSS sees (A1)
    seq_len: int = 16  # sequence length F (agent steps)
    cube_size: int = 7  # spatial size of a cube, h = w (pixels)
    cube_len: int = 4  # temporal length f of a cube (agent steps)
    mask_type: Literal["walk", "cube"] = "walk"  # a random walk, or uniform cubes as in MLR
    mask_ratio: float = None  # share p_m of the cubes that is zeroed
    walk_connectivity: Literal[26, 6] = 26  # neighbours of an inner cube (D4)
    walk_root: Literal["random", "fixed"] = "random"  # start of the walk (D5)
    share_mask: bool = False  # one mask for the whole batch (D6)
    crop_per_sequence: bool = False  # one crop for a whole sequence (D10)
    # tokens of the decoder: states, actions, rewards; none: its MLP head alone
    decoder_inputs: Literal["none", "s", "sa", "sar"] = "sa"
    decoder_depth: int = 2  # Transformer blocks of g_phi
    decoder_heads: int = 4  # attention heads
    head_dim: int = 100  # hidden units of the decoder's MLP head
    temporal_window: int = None  # temporal window L (D1)
    tau0: float = 0.07  # contrastive temperature tau_0
    tau_step: float = 0.075  # contrastive temperature step tau_{l+1} - tau_l
    level_reduction: Literal["mean", "sum"] = "mean"  # how a query's levels combine (D2)
    normalize_embeddings: bool = True  # L2-normalise queries and keys before W (D3)


PAPER = dict(eval_episodes=100, batch_size=32, mask_ratio=0.5, temporal_window=6)
TASK_PRESETS = {
    game: dict(mask_ratio=0.1, temporal_window=2)
    for game in ("Gopher", "Kangaroo", "MsPacman", "Pong", "Seaquest")
}
PRESETS = {"paper": {}, "laptop": dict(eval_episodes=20, batch_size=16)}


def fill_presets(args):
    """What is None takes its value from the preset, else from the game, else from the paper."""
    env_id = re.sub(r"^ALE/(\w+)-v\d+$", r"\1", args.env_id)
    env_id = re.sub(r"(NoFrameskip|Deterministic)-v\d+$", "", env_id)
    values = {**PAPER, **TASK_PRESETS.get(env_id, {}), **PRESETS[args.preset]}
    unset = {name: value for name, value in values.items() if getattr(args, name) is None}
    return dataclasses.replace(args, env_id=env_id, **unset)


def resolve_args(args):
    """The arguments with every preset filled in; values that cannot work are refused."""
    args = fill_presets(args)
    followers = max(args.seq_len - 1, args.multi_step)  # rows that a row needs behind it
    common.check_names(args)
    common.check_ranges(args, {
        "seed": (0, 2**32 - 1),
        "total_timesteps log_every replay_period target_update_period max_frames": (1, 10**12),
        "checkpoint_every eval_every": (0, 10**12),
        "eval_episodes batch_size": (1, 10**6),
        "action_repeat updates_per_step multi_step seq_len": (1, 1000),
        "frame_stack": (1, 16),
        "image_size": (1, 210),
        "crop_pad noop_max": (0, 1000),
        "min_replay": (followers + 1, 10**12),
        "buffer_size": (followers + args.frame_stack + 1, 10**8),
        "num_atoms": (2, 10_001),
        "hidden_units state_dim head_dim": (1, 10**5),
        "decoder_depth": (1, 100),
        "temporal_window": (0, args.seq_len - 1),
        "gamma target_ema mask_ratio epsilon eval_epsilon priority_exponent": (0, 1),
        "learning_rate adam_eps aux_adam_eps intensity_scale": (0, 1),
        "beta1 beta2": (0, 0.999999),
        "v_min v_max": (-1e9, 1e9),
        "reward_clip noisy_std aux_weight tau_step": (0, 1e3),
        "tau0 max_grad_norm": (1e-6, 1e6),
    })
    common.check_divides(
        args, image_size="cube_size", seq_len="cube_len", state_dim="decoder_heads")
    common.require(
        args.v_min < args.v_max, f"--v-min {args.v_min} is not below --v-max {args.v_max}")
    common.require(
        0 <= min(args.priority_correction) and max(args.priority_correction) <= 1,
        "--priority-correction needs two shares between 0 and 1")
    layers = (args.channels, args.filter_sizes, args.strides)
    alike = len({len(layer) for layer in layers}) == 1
    sizes = [size for layer in layers for size in layer]
    common.require(
        alike and args.channels and all(1 <= size <= 10**5 for size in sizes),
        "--channels, --filter-sizes and --strides need the same number of values, 1 to 100000")
    common.require(
        feature_side(args) >= 1,
        f"--image-size {args.image_size} is too small for these conv layers")
    common.require(not args.eval_only or args.checkpoint, "--eval-only needs --checkpoint PATH")
    return args


def feature_side(args):
    """Side of the conv features: 7 for the paper's layers on 84x84; 0 if a layer does not fit."""
    side = args.image_size
    for size, stride in zip(args.filter_sizes, args.strides):
        side = (side - size) // stride + 1 if side >= size else 0
    return side


# ------------------------------------------------------------------------------------- environment
class LifeEpisodes(gym.Wrapper):
    """Losing a life ends the learning episode while the game goes on.

    A reset without a seed is then one no-op step, not a new game. `info["game_over"]` tells the two
    kinds of ends apart. The frame limit counts as terminal.
    """

    def reset(self, *, seed=None, options=None):
        game_over = True
        if seed is None:
            obs, _, terminated, truncated, info = self.env.step(0)
            game_over = terminated or truncated
        if game_over:
            obs, info = self.env.reset(seed=seed, options=options)
        self.lives = self.env.unwrapped.ale.lives()
        return obs, info

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        game_over = terminated or truncated
        lives = self.env.unwrapped.ale.lives()
        life_lost = 0 < lives < self.lives
        self.lives = lives
        return obs, reward, game_over or life_lost, False, {**info, "game_over": game_over}


def make_env(args, device, training=True):
    """A game with observations (frame_stack, C, H, W), zeros before an episode's first frame.

    `device` is not used: games render on the CPU.
    """
    import ale_py

    gym.register_envs(ale_py)
    env_ids = [name for name in gym.registry if re.fullmatch(r"ALE/\w+-v5", name)]
    games = [name.removeprefix("ALE/").removesuffix("-v5") for name in env_ids]
    common.require_known("--env-id", args.env_id, games)
    env = gym.make(
        f"ALE/{args.env_id}-v5", frameskip=1, repeat_action_probability=0.0,
        render_mode="rgb_array",
        max_num_frames_per_episode=args.max_frames, disable_env_checker=True)
    has_no_op = env.unwrapped.get_action_meanings()[0] == "NOOP"
    common.require(has_no_op, f"--env-id {args.env_id} has no no-op action")
    # Frame skip with the maximum over the last two frames, then an area resize (A7).
    env = gym.wrappers.AtariPreprocessing(
        env, noop_max=args.noop_max, frame_skip=args.action_repeat, screen_size=args.image_size,
        grayscale_obs=args.gray_scale, grayscale_newaxis=True)  # (H, W, C)
    if training:
        env = LifeEpisodes(env)
    shape = (1 if args.gray_scale else 3, args.image_size, args.image_size)
    env = gym.wrappers.TransformObservation(
        env, lambda frame: frame.transpose(2, 0, 1), gym.spaces.Box(0, 255, shape, np.uint8))
    return gym.wrappers.FrameStackObservation(env, args.frame_stack, padding_type="zero")


# ------------------------------------------------------------------------------------------ replay
NO_ACTION = -1  # of a row that closes an episode; such a row is never drawn


class SequenceReplay:
    """Every frame once, as bytes; stacks, n-step returns and sequences are put together here.

    A row is one agent step: a frame, the action taken at it, its reward, and whether that ended the
    episode. The newest row waits for its action. An episode's last frame is a row without an
    action and closes the episode. Rows are numbered from the start of the run and, once they have
    their action, never change; row r lives in slot r % capacity. A row can be drawn, in proportion
    to its priority, once the rows that its return and its sequence need have followed, and until
    frames of its stack are overwritten.
    """

    columns = ("frames", "actions", "rewards", "terminated", "episode_starts")

    def __init__(self, capacity, frame_shape, frame_stack, seq_len, multi_step, device):
        self.capacity = capacity
        self.frame_stack = frame_stack
        self.seq_len = seq_len
        self.multi_step = multi_step
        self.device = device
        self.frames = torch.zeros(capacity, *frame_shape, dtype=torch.uint8, device=device)
        self.actions = torch.zeros(capacity, dtype=torch.long, device=device)
        self.rewards = torch.zeros(capacity, device=device)
        self.terminated = torch.zeros(capacity, dtype=torch.bool, device=device)
        # The row at which a row's episode began.
        self.episode_starts = torch.zeros(capacity, dtype=torch.long, device=device)
        # In float64, so that their sum stays exact enough; 0 for rows that cannot be drawn.
        self.priorities = torch.zeros(capacity, dtype=torch.float64, device=device)
        self.newest_row = -1
        self.newest_start = 0

    def begin_episode(self, frame):
        """Store the first frame of an episode."""
        self.newest_start = self.newest_row + 1
        self._append(frame)

    def add(self, action, reward, terminated, next_frame):
        """Complete the newest row by what was done at it, and store the frame that followed."""
        slot = self.newest_row % self.capacity
        self.actions[slot].fill_(action)
        self.rewards[slot].fill_(reward)
        self.terminated[slot].fill_(terminated)
        self._append(next_frame)

    def _append(self, frame):
        self.newest_row += 1
        slot = self.newest_row % self.capacity
        self.frames[slot] = common.upload(torch.as_tensor(frame), self.device)
        self.actions[slot].fill_(NO_ACTION)
        self.rewards[slot].fill_(0.0)
        self.terminated[slot].fill_(False)
        self.episode_starts[slot].fill_(self.newest_start)
        self.priorities[slot].fill_(0.0)
        if self.oldest_row > 0:
            # A row was overwritten, and the next oldest ones lost a frame of their stacks.
            for row in range(self.oldest_row, self.oldest_row + self.frame_stack - 1):
                self.priorities[row % self.capacity].fill_(0.0)
        # The newest row that enough complete rows have followed by now may be drawn from here on,
        # with priority 1, unless it only closes an episode.
        newest_complete = self.newest_row - 1
        ready_row = newest_complete - max(self.seq_len - 1, self.multi_step)
        if ready_row >= 0:
            slot = ready_row % self.capacity
            self.priorities[slot] = (self.actions[slot] != NO_ACTION).double()

    @property
    def oldest_row(self):
        return max(0, self.newest_row + 1 - self.capacity)

    def sample(self, count, beta):
        """Rows (count,) by priority, and their importance weights (N p)^-beta over the largest."""
        cumulative = self.priorities.cumsum(0)
        total = cumulative[-1]
        place = total * torch.rand(count, dtype=torch.float64, device=self.device)
        slots = torch.searchsorted(cumulative, place, right=True).clamp(max=self.capacity - 1)
        # A sum that is rounded may lead to a row that cannot be drawn: take the likeliest instead.
        slots = slots.where(self.priorities[slots] > 0, self.priorities.argmax())
        # In (N p)^-beta over the largest, N and the sum of the priorities cancel.
        priorities = self.priorities[slots]
        weights = (priorities.min() / priorities) ** beta
        # A slot that lies so many slots before the newest row's holds a row so much older.
        ages = (self.newest_row - slots) % self.capacity
        return self.newest_row - ages, weights.float()

    def set_priorities(self, rows, priorities, exponent):
        slots = rows % self.capacity
        self.priorities[slots] = priorities.double().clamp(1e-6, 1e6) ** exponent

    def returns(self, rows, gamma):
        """n-step returns (B,), cut at an episode's end (A2), and the discount (B,) after them."""
        steps = torch.arange(self.multi_step, device=self.device)
        slots = (rows[:, None] + steps) % self.capacity  # (B, n)
        alive_before, alive_after = self._alive(slots)
        returns = (self.rewards[slots] * gamma**steps * alive_before).sum(1)
        return returns, gamma**self.multi_step * alive_after[:, -1]

    def sequences(self, rows):
        """Actions, rewards, and which steps lie before the episode's end (A3), each (B, F)."""
        steps = torch.arange(self.seq_len, device=self.device)
        slots = (rows[:, None] + steps) % self.capacity  # (B, F)
        alive_before, _ = self._alive(slots)
        return self.actions[slots], self.rewards[slots], alive_before.bool()

    def _alive(self, slots):
        """Whether the episode of the first slot still runs before, after each: (B, steps) both."""
        alive_after = (~self.terminated[slots]).float().cumprod(1)
        alive_at_first = torch.ones_like(alive_after[:, :1])
        alive_before = torch.cat([alive_at_first, alive_after[:, :-1]], dim=1)
        return alive_before, alive_after

    def frames_of(self, rows, length):
        """The frames of `length` observations from each row (B,) on, oldest first.

        (B, frame_stack - 1 + length, C, H, W), zero before the first frame of the row's episode.
        """
        steps = torch.arange(1 - self.frame_stack, length, device=self.device)
        needed = rows[:, None] + steps  # (B, frame_stack - 1 + length)
        slots = needed % self.capacity
        frames = self.frames.index_select(0, slots.flatten()).unflatten(0, slots.shape)
        # Frames of a next episode need no care: those steps are not valid (A3), or weigh 0 (A2).
        exists = needed >= self.episode_starts[rows % self.capacity][:, None]
        return frames * exists[..., None, None, None]

    def state_dict(self):
        """All that the columns of complete rows do not say."""
        # A copy: a view would bring all frames into the file.
        newest_frame = self.frames[self.newest_row % self.capacity].cpu().clone()
        return {
            "newest_row": self.newest_row,
            "newest_start": self.newest_start,
            "newest_frame": newest_frame,
            "priorities": self.priorities.cpu(),
        }

    def load_state_dict(self, state):
        self.newest_row = state["newest_row"] - 1
        self.newest_start = state["newest_start"]
        self._append(state["newest_frame"])
        self.priorities.copy_(state["priorities"])


# ------------------------------------------------------------------------------------ augmentation
def replicate_borders(frames, pad):
    """Frames (B, T, C, H, W) with `pad` pixels more on each side."""
    floats = frames.flatten(0, 1).float()  # torch replicates borders of floats only
    padded = F.pad(floats, (pad, pad, pad, pad), mode="replicate").byte()
    return padded.unflatten(0, frames.shape[:2])


def stack_frames(frames, frame_stack):
    """Frames (B, frame_stack - 1 + F, C, H, W) to stacks (B, F, frame_stack * C, H, W)."""
    length = frames.shape[1] - frame_stack + 1
    # Put together along the last dimension: in memory the channels then come last, which crops
    # keep and convolutions are fast with.
    frames = frames.movedim(2, 4)  # (B, frame_stack - 1 + F, H, W, C)
    ages = [frames[:, age:age + length] for age in range(frame_stack)]
    return torch.cat(ages, dim=4).movedim(4, 2)


def random_crop(images, size, per_sequence=False):
    """Windows at random places: (B, ..., C, H, W) -> (N, C, size, size), N = B * ...

    A place is drawn for each image, or for all images of a sequence (D10). Every window that fits
    is as likely as any other (D15).
    """
    places = images.shape[-1] - size + 1
    all_images = images.shape[:-3]
    drawn = (len(images), 1) if per_sequence else all_images
    corners = torch.randint(places, (2, *drawn), device=images.device)
    top, left = corners.expand(2, *all_images).flatten(1)  # (N,) each
    # A view of all windows of all images costs nothing; indexing it copies one window of each.
    windows = images.flatten(0, -4).unfold(2, size, 1)
    windows = windows.unfold(3, size, 1)  # (N, C, tops, lefts, size, size)
    every = torch.arange(len(windows), device=images.device)
    return windows[every, :, top, left]  # (N, C, size, size)


def scale(pixels, factor):
    """Bytes (N, C, H, W) times a factor, as floats in the memory layout that convolutions like."""
    floats = pixels.to(torch.get_default_dtype(), memory_format=torch.channels_last)
    return floats.mul_(factor)


def augment(stacks, args):
    """Bytes (B, F, C, H', W') to observations (B * F, C, H, W), at random, anew at every call."""
    if "crop" in args.augmentations:
        pixels = random_crop(stacks, args.image_size, args.crop_per_sequence)
    else:
        pixels = stacks.flatten(0, 1)
    factor = 1 / 255  # A8
    if "intensity" in args.augmentations:
        noise = torch.randn(len(pixels), 1, 1, 1, device=pixels.device).clamp(-2, 2)
        factor = factor * (1 + args.intensity_scale * noise)
    return scale(pixels, factor)


# ------------------------------------------------------------------------------------------- masks
def random_walk_masks(count, grid, ratio, generator, connectivity=26, root="random"):
    """Masks (count, *grid), True = masked: the nodes that a random walk on the graph of cubes has
    visited when they are floor(ratio * nodes) (Eq. 2). All walks advance together.
    """
    # Nodes are numbered in a grid with a wall around it: there, a move to a neighbour adds the same
    # number at every node, and a walk notices where the grid ends.
    inside = F.pad(torch.ones(grid, dtype=torch.bool), [1] * 6)
    number_step = torch.tensor(inside.stride())  # what a step along t, h or w adds to the number
    inside = inside.flatten()
    nodes = inside.nonzero().flatten()

    # All moves to an adjacent node change one to three coordinates by one (D4).
    moves = torch.cartesian_prod(*[torch.arange(-1, 2)] * 3)  # (27, 3): along t, h, w
    changed = moves.abs().sum(1)
    if connectivity == 26:
        moves = moves[changed > 0]
    elif connectivity == 6:
        moves = moves[changed == 1]
    else:
        raise ValueError(f"unknown connectivity of the graph: {connectivity}")
    offsets = (moves * number_step).sum(1)  # (26,) or (6,)

    if root == "random":
        drawn = torch.randint(len(nodes), (count,), generator=generator)
        here = nodes[drawn]
    elif root == "fixed":  # D5: where the authors' walks begin
        here = nodes[len(nodes) // 2].expand(count)
    else:
        raise ValueError(f"unknown root of the walk: {root}")

    walks = torch.arange(count)
    visited = torch.zeros(count, len(inside), dtype=torch.bool)
    missing = torch.full((count,), math.floor(ratio * len(nodes)))
    while (missing > 0).any():
        # A complete mask takes no more nodes while the other walks go on.
        is_new = ~visited[walks, here] & (missing > 0)
        visited[walks, here] |= is_new
        missing -= is_new.long()
        # Before the wall a walk stays and draws again, so that all real neighbours are as likely.
        drawn = torch.randint(len(offsets), (count,), generator=generator)
        there = here + offsets[drawn]
        here = torch.where(inside[there], there, here)
    time, height, width = grid
    with_wall = visited.view(count, time + 2, height + 2, width + 2)
    return with_wall[:, 1:-1, 1:-1, 1:-1]


def uniform_cube_masks(count, grid, ratio, generator):
    """Masks (count, *grid), True = masked: floor(ratio * nodes) nodes, uniformly drawn, as MLR."""
    nodes = math.prod(grid)
    order = torch.rand(count, nodes, generator=generator).argsort(dim=1)
    rank = order.argsort(dim=1)  # of each node, in an order drawn at random
    return (rank < math.floor(ratio * nodes)).view(count, *grid)


class MaskBank:
    """The masks of every update, as a pure function of (seed, index of the update).

    Walks for one update take nearly as long as walks for 64, so 64 updates' masks are drawn at
    once, and a thread draws the next block while this one is used.
    """

    BLOCK = 64

    def __init__(self, args, batch_size, device):
        self.args = args
        self.batch_size = batch_size
        self.device = device
        side = args.image_size // args.cube_size
        self.grid = (args.seq_len // args.cube_len, side, side)
        # One core: a second team of OpenMP threads would slow down every small operation.
        self.thread = concurrent.futures.ThreadPoolExecutor(
            1, initializer=torch.set_num_threads, initargs=(1,))
        self.blocks = {}  # this block and the next: number -> future masks

    def draw(self, number):
        """Masks of a block of updates: (64, B, *grid), or (64, 1, *grid) if shared (D6).

        This runs beside the training: whatever is random here must come from `generator`.
        """
        args = self.args
        seed = common.derive_seed(args.seed, "masks", number)
        generator = torch.Generator().manual_seed(seed)
        count = self.BLOCK * (1 if args.share_mask else self.batch_size)
        if args.mask_type == "walk":
            masks = random_walk_masks(
                count, self.grid, args.mask_ratio, generator, args.walk_connectivity,
                args.walk_root)
        elif args.mask_type == "cube":
            masks = uniform_cube_masks(count, self.grid, args.mask_ratio, generator)
        else:
            raise ValueError(f"unknown type of mask: {args.mask_type}")
        return common.upload(masks.unflatten(0, (self.BLOCK, -1)), self.device)

    def __call__(self, index):
        """Masks of an update as pixels: (B * F, 1, H, W), True = masked."""
        number = index // self.BLOCK
        for needed in (number, number + 1):
            if needed not in self.blocks:
                self.blocks[needed] = self.thread.submit(self.draw, needed)
        self.blocks.pop(number - 1, None)
        cubes = self.blocks[number].result()[index % self.BLOCK]
        masks = cubes.expand(self.batch_size, *self.grid)  # (B, F/f, H/h, W/w)
        masks = masks.repeat_interleave(self.args.cube_len, dim=1)
        masks = masks.repeat_interleave(self.args.cube_size, dim=2)
        masks = masks.repeat_interleave(self.args.cube_size, dim=3)  # (B, F, H, W)
        return masks.flatten(0, 1)[:, None]


# ---------------------------------------------------------------------------------------- networks
class NoisyLinear(nn.Linear):
    """Linear layer with factorised Gaussian noise: the noise of the weights has rank one.

    Means start as torch starts them, uniform on +-1/sqrt(inputs). Without `std` it is an ordinary
    layer.
    """

    def __init__(self, inputs, outputs, std=None):
        super().__init__(inputs, outputs)
        self.has_noise = std is not None
        if self.has_noise:
            weight_sigma = torch.full((outputs, inputs), std / math.sqrt(inputs))
            bias_sigma = torch.full((outputs,), std / math.sqrt(outputs))
            self.weight_sigma = nn.Parameter(weight_sigma)
            self.bias_sigma = nn.Parameter(bias_sigma)
            self.register_buffer("noise_in", torch.zeros(inputs))
            self.register_buffer("noise_out", torch.zeros(outputs))

    def draw_noise(self):
        for noise in (self.noise_in, self.noise_out):
            noise.normal_()
            noise.copy_(noise.abs().sqrt().copysign(noise))

    def forward(self, x, noisy=True):
        out = F.linear(x, self.weight, self.bias)
        if noisy and self.has_noise:
            # (sigma * outer(noise_out, noise_in)) x, without building that matrix
            noise = F.linear(x * self.noise_in, self.weight_sigma, self.bias_sigma)
            out = out + self.noise_out * noise
        return out


def full_precision(outputs):
    """What networks leave in bf16, under --amp, as the floats that losses are computed in."""
    return outputs.to(torch.get_default_dtype())


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
    """Encoder, Q head and, for MOOSS, the projection to a state.

    One frozen copy of it serves both as Q target and as key encoder.
    """

    def __init__(self, args, channels, num_actions):
        super().__init__()
        layers = []
        for filters, size, stride in zip(args.channels, args.filter_sizes, args.strides):
            layers += [nn.Conv2d(channels, filters, size, stride), nn.ReLU(inplace=True)]
            channels = filters
        self.convs = nn.Sequential(*layers, nn.Flatten())
        feature_count = channels * feature_side(args) ** 2
        self.num_actions = num_actions
        self.atoms = args.num_atoms if args.distributional else 1
        self.advantage = Stream(feature_count, num_actions * self.atoms, args)
        self.value = Stream(feature_count, self.atoms, args) if args.dueling else None
        if args.aux_weight > 0:  # A1
            self.projection = nn.Sequential(
                nn.Linear(feature_count, args.state_dim), nn.LayerNorm(args.state_dim))

    def features(self, obs):
        """Conv features, each sample rescaled to [0, 1]: (B, C, H, W) to (B, features)."""
        x = full_precision(self.convs(obs))
        low = x.min(1, keepdim=True).values
        high = x.max(1, keepdim=True).values
        return (x - low) / (high - low).clamp(min=1e-5)

    def state(self, obs):
        return self.projection(self.features(obs))

    def forward(self, obs, noisy=True):
        """Logits over atoms (B, actions, atoms), or Q values with one atom."""
        x = self.features(obs)
        # Forwards this is x; backwards, the gradient that the encoder gets is scaled by 1/sqrt(2).
        x = x + (math.sqrt(0.5) - 1) * (x - x.detach())
        advantage = full_precision(self.advantage(x, noisy))
        out = advantage.view(-1, self.num_actions, self.atoms)
        if self.value is not None:
            value = full_precision(self.value(x, noisy))
            value = value.view(-1, 1, self.atoms)
            out = out - out.mean(1, keepdim=True) + value
        return out

    def draw_noise(self):
        for module in self.modules():
            if isinstance(module, NoisyLinear) and module.has_noise:
                module.draw_noise()


class PredictiveDecoder(nn.Module):
    """g_phi: masked states and actions to queries (Sec. 4.2).

    `inputs` names the tokens of a step: s, sa or sar; `none` leaves only the MLP head. Tokens are
    interleaved s_0 a_0 s_1 a_1 ..., and a_i is the action taken at o_i, so that the causal query i
    sees the states up to i and the actions before i.
    """

    def __init__(self, state_dim, action_dim, depth=2, heads=4, head_dim=100, inputs="sa"):
        super().__init__()
        if inputs not in ("none", "s", "sa", "sar"):
            raise ValueError(f"unknown inputs of the decoder: {inputs}")
        self.inputs = inputs
        if inputs != "none":
            self.blocks = nn.ModuleList([
                nn.TransformerEncoderLayer(
                    state_dim, heads, 4 * state_dim, dropout=0.0, activation="gelu",
                    layer_norm_eps=1e-6, batch_first=True, norm_first=True)
                for _ in range(depth)
            ])
            self.norm = nn.LayerNorm(state_dim, eps=1e-6)
            self.embed_action = nn.Linear(action_dim, state_dim) if "a" in inputs else None
            self.embed_reward = nn.Linear(1, state_dim) if "r" in inputs else None
            # Torch starts q, k and v (one 3d x d matrix) in this way by itself.
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    nn.init.xavier_uniform_(module.weight)
                    nn.init.zeros_(module.bias)
        self.head = nn.Sequential(
            nn.Linear(state_dim, head_dim), nn.ReLU(), nn.Linear(head_dim, state_dim))

    def forward(self, states, actions, rewards=None):
        """States (B, F, d), actions (B, F, A), rewards (B, F, 1) to queries (B, F, d)."""
        if self.inputs == "none":
            return self.head(states)
        tokens = [states]
        if self.embed_action is not None:
            tokens.append(self.embed_action(actions))
        if self.embed_reward is not None:
            tokens.append(self.embed_reward(rewards))
        x = torch.stack(tokens, dim=2)  # (B, F, tokens, d)
        x = x + self.positions(states)[:, None]  # the tokens of a step share their position
        x = x.flatten(1, 2)  # (B, F * tokens, d)
        causal = nn.Transformer.generate_square_subsequent_mask(
            x.shape[1], device=x.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=causal, is_causal=True)
        at_states = self.norm(x)[:, ::len(tokens)]  # (B, F, d)
        return self.head(at_states)

    def positions(self, states):
        """The fixed sinusoidal encoding of the time steps: (F, d)."""
        _, length, dim = states.shape
        step = torch.arange(length, device=states.device)
        channel = torch.arange(0, dim, 2, device=states.device)
        frequency = torch.exp(channel * (-math.log(10000.0) / dim))
        angle = step[:, None] * frequency  # (F, d / 2)
        waves = torch.stack([angle.sin(), angle.cos()], dim=2)  # (F, d / 2, 2)
        return waves.flatten(1)[:, :dim]


# -------------------------------------------------------------------------------------------- loss
def within_sequences(similarity, seq_len):
    """What each sequence has to do with itself: (B*F, B*F) to (B, F, F)."""
    batch = len(similarity) // seq_len
    blocks = similarity.view(batch, seq_len, batch, seq_len)
    return blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def steps_apart(seq_len, device):
    """|i - j| for all steps i and j of a sequence: (F, F)."""
    time = torch.arange(seq_len, device=device)
    return (time[:, None] - time).abs()


def temporal_contrastive_loss(
    similarity, seq_len, window, tau0=0.07, tau_step=0.075, reduction="mean", weights=None,
    valid=None,
):
    """Ranked InfoNCE (Eq. 7): at level l, the keys l steps away from a query against all keys that
    are at least l steps away or of another sequence.

    similarity (B*F, B*F) has queries as rows and keys as columns, sequences contiguous; weights
    (B,) scale a sequence's queries; valid (B, F) is False for steps that are neither query nor key.
    """
    batch = len(similarity) // seq_len
    device = similarity.device
    if weights is None:
        weights = similarity.new_ones(batch)
    if valid is None:
        valid = torch.ones(batch, seq_len, dtype=torch.bool, device=device)
    # exp(nothing) is 0, and no gradient becomes NaN as with -inf; it is still finite when it is
    # divided by the smallest temperature.
    nothing = torch.finfo(similarity.dtype).min * min(1.0, tau0)

    # From level to level the large part, the keys of other sequences, changes only its temperature;
    # what else changes lies in the small block of a sequence with itself.
    blocks = similarity.view(batch, seq_len, batch, seq_len)
    same_sequence = torch.eye(batch, dtype=torch.bool, device=device)
    not_across = same_sequence[:, None, :, None] | ~valid
    across = blocks.masked_fill(not_across, nothing).flatten(2)  # (B, F, B*F)
    within = within_sequences(similarity, seq_len)  # (B, F, F)
    distance = steps_apart(seq_len, device)  # (F, F)

    levels = torch.arange(window + 1, device=device)[:, None, None, None]
    positive = (distance == levels) & valid[:, None]  # (L + 1, B, F, F)
    further = (distance >= levels) & valid[:, None]
    taus = [tau0 + level * tau_step for level in range(window + 1)]
    logits = torch.stack([within / tau for tau in taus])
    log_positives = logits.masked_fill(~positive, nothing).logsumexp(3)  # (L + 1, B, F)
    log_further = logits.masked_fill(~further, nothing).logsumexp(3)
    # One level after the other: these are large.
    log_others = torch.stack([(across / tau).logsumexp(2) for tau in taus])
    losses = torch.logaddexp(log_further, log_others) - log_positives
    # A middle query has no key at a large distance: that pair of query and level is left out.
    counted = valid & positive.any(3)
    total = (weights[:, None] * losses).masked_fill(~counted, 0).sum()

    if reduction == "mean":  # D2
        return total / counted.sum().clamp(min=1)
    if reduction == "sum":
        return total / valid.sum().clamp(min=1)
    raise ValueError(f"unknown reduction over levels: {reduction}")


@torch.no_grad()
def rank_accuracy(similarity, seq_len, window, valid=None):
    """Of all pairs of keys that are l and l + 1 steps from a query (l < window), the share in which
    the nearer key is the more similar one. Chance is 0.5.
    """
    within = within_sequences(similarity, seq_len)  # (B, query, key)
    distance = steps_apart(seq_len, similarity.device)
    near = distance[:, :, None]  # (query, near, 1)
    far = distance[:, None, :]  # (query, 1, far)
    pairs = (near + 1 == far) & (near < window)
    pairs = pairs.expand(len(within), -1, -1, -1)
    if valid is not None:
        pairs = pairs & valid[:, :, None, None]
        pairs = pairs & valid[:, None, :, None]
        pairs = pairs & valid[:, None, None, :]
    right_order = within[:, :, :, None] > within[:, :, None, :]
    return (pairs & right_order).sum() / pairs.sum().clamp(min=1)


@torch.no_grad()
def ema_update(target, online, m):
    """target = m * target + (1 - m) * online, for all parameters in a few kernels."""
    torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), 1 - m)


def project_distribution(probabilities, rewards, discounts, support):
    """C51: the distribution (B, atoms) of reward + discount * Z, on the atoms of the support.

    The mass of a moved atom is split between its two neighbours.
    """
    low = support[0]
    high = support[-1]
    gap = support[1] - support[0]
    moved = rewards[:, None] + discounts[:, None] * support  # (B, atoms)
    moved = moved.clamp(low, high)
    distance = (moved[:, None, :] - support[:, None]).abs()  # (B, to, from)
    share = (1 - distance / gap).clamp(min=0)
    return (share * probabilities[:, None, :]).sum(2)


# ------------------------------------------------------------------------------------------- agent
class Agent(nn.Module):
    """Networks, optimiser, and one update told step by step. Losses map tensors to tensors."""

    def __init__(self, args, obs_shape, num_actions, device):
        super().__init__()
        self.args = args
        self.obs_shape = tuple(obs_shape)  # (frame_stack, C, H, W)
        self.num_actions = num_actions
        self.shape = (self.obs_shape, num_actions)  # what a checkpoint needs to build it again
        self.device = device
        self.online = Network(args, obs_shape[0] * obs_shape[1], num_actions)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        support = torch.linspace(args.v_min, args.v_max, args.num_atoms)
        self.register_buffer("support", support, persistent=False)
        if args.aux_weight > 0:
            self.decoder = PredictiveDecoder(
                args.state_dim, num_actions, args.decoder_depth, args.decoder_heads,
                args.head_dim, args.decoder_inputs)
            self.bilinear = nn.Parameter(torch.rand(args.state_dim, args.state_dim))  # W
            self.masks = MaskBank(args, args.batch_size, device)
        # What those who only act do not need: the target's Q heads, and the noise.
        self.unused = tuple(
            name for name in self.state_dict()
            if name.startswith(("target.advantage", "target.value")) or "sigma" in name)
        self.to(device, memory_format=torch.channels_last)

        rl_modules = [self.online.convs, self.online.advantage]
        if args.dueling:
            rl_modules.append(self.online.value)
        self.rl_parameters = list(nn.ModuleList(rl_modules).parameters())
        groups = [{"params": self.rl_parameters, "eps": args.adam_eps}]
        if args.aux_weight > 0:
            aux_modules = nn.ModuleList([self.online.projection, self.decoder])
            self.aux_parameters = [*aux_modules.parameters(), self.bilinear]
            groups.append({"params": self.aux_parameters, "eps": args.aux_adam_eps})  # A6
        optimizers = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
        adam = optimizers[args.optimizer]
        betas = (args.beta1, args.beta2)
        self.optimizers = {"all": adam(groups, args.learning_rate, betas, fused=True)}
        if args.compile:
            self.backward = common.compiled(self.backward)
        self.metrics = {}  # what an update leaves to log: tensors, which nobody waits for here

    def autocast(self):
        bf16 = self.args.amp == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=bf16)

    def q_values(self, out):
        """Expected values (B, actions) of a network's output."""
        if self.args.distributional:
            return (out.softmax(2) * self.support).sum(2)
        return out[..., 0]

    def images_per_update(self):
        """Encoder passes of an update; a backward pass counts as two."""
        args = self.args
        aux_images = 4 * args.batch_size * args.seq_len if args.aux_weight > 0 else 0
        return 5 * args.batch_size + aux_images

    @torch.no_grad()
    def act(self, obs, noisy=False):
        """Greedy action for an observation (frame_stack, C, H, W) in bytes, or (N,) for N."""
        obs = torch.as_tensor(obs)
        common.check_observation(obs, self.obs_shape)
        pixels = obs.view(-1, *self.obs_shape).flatten(1, 2)
        pixels = scale(common.upload(pixels, self.device), 1 / 255)
        with self.autocast():
            out = self.online(pixels, noisy)
        actions = self.q_values(out).argmax(1).cpu().numpy()
        return actions if obs.dim() == 5 else actions[0]

    def update(self, replay, index, beta, log):
        """Update number `index`: one batch, one step on L_rl + lambda * L_MOOSS, then priorities
        and target network.

        `beta` is the importance exponent; `log` asks for the metrics that cost something. Where the
        replay is on the agent's device, the CPU waits for nothing here.
        """
        args = self.args
        self.online.draw_noise()

        # Sample: RL learns from the first step of each sequence, MOOSS from all of them.
        rows, weights = replay.sample(args.batch_size, beta)  # (B,)
        weights = common.upload(weights, self.device)
        returns, discounts = common.upload(replay.returns(rows, args.gamma), self.device)  # (B,)
        actions, rewards, valid = common.upload(replay.sequences(rows), self.device)  # (B, F)
        stacks = self.stacks(replay, rows, args.seq_len if args.aux_weight > 0 else 1)
        next_stacks = self.stacks(replay, rows + args.multi_step, 1)

        # Augment: every use of an observation has a crop and an intensity of its own.
        obs = augment(stacks[:, :1], args)  # (B, C, H, W)
        next_obs = augment(next_stacks, args)  # here the online network chooses the action
        next_obs_target = augment(next_stacks, args)  # and here the target network values it
        rl_batch = (obs, actions[:, 0], returns, discounts, next_obs, next_obs_target)
        mooss_batch = None
        if args.aux_weight > 0:
            mooss_batch = self.mooss_batch(stacks, actions, rewards, valid, weights, index)

        outputs = self.learn(weights, rl_batch, mooss_batch)
        # Plainly copied: memory of the host must not be read before such a copy has come to an end.
        priorities = outputs["priorities"].to(replay.device)
        replay.set_priorities(rows, priorities, args.priority_exponent)
        self.update_targets(index)
        self.metrics |= {"rainbow/is_exponent": beta, "charts/learning_rate": args.learning_rate}
        if log:
            self.metrics |= self.encoder_metrics(obs)
        if log and args.aux_weight > 0:
            self.metrics |= self.mooss_metrics(outputs["similarity"], valid, index)

    def stacks(self, replay, rows, length):
        """Stacks of `length` observations from each row on, with borders for the crops to come."""
        frames = common.upload(replay.frames_of(rows, length), self.device)
        if "crop" in self.args.augmentations:
            frames = replicate_borders(frames, self.args.crop_pad)
        return stack_frames(frames, self.args.frame_stack)  # (B, length, C, H', W')

    def learn(self, weights, rl_batch, mooss_batch):
        """One step on L_rl + lambda * L_MOOSS."""
        args = self.args
        self.optimizers["all"].zero_grad()
        outputs = self.backward(weights, rl_batch, mooss_batch)
        rl_norm = nn.utils.clip_grad_norm_(self.rl_parameters, args.max_grad_norm)
        self.metrics |= {
            "losses/rl": outputs["rl_loss"],
            "rainbow/q": outputs["q"],
            "rainbow/priority": outputs["priorities"].mean(),
            "rainbow/grad_norm": rl_norm,
        }
        if mooss_batch is not None:
            aux_norm = nn.utils.clip_grad_norm_(self.aux_parameters, args.max_grad_norm)
            self.metrics["mooss/grad_norm"] = aux_norm
        self.optimizers["all"].step()
        return outputs

    def backward(self, weights, rl_batch, mooss_batch):
        """Put the gradients of both losses into the parameters; what they found, detached."""
        losses, priorities, q = self.rl_loss(*rl_batch)
        rl_loss = (weights * losses).mean()
        outputs = {"rl_loss": rl_loss, "priorities": priorities, "q": q}
        loss = rl_loss
        if mooss_batch is not None:
            mooss_loss, similarity = self.mooss_loss(*mooss_batch)
            outputs["similarity"] = similarity
            loss = rl_loss + self.args.aux_weight * mooss_loss
        loss.backward()
        return {name: value.detach() for name, value in outputs.items()}

    # Rainbow

    def rl_loss(self, obs, actions, returns, discounts, next_obs, next_obs_target):
        """Double DQN on n-step returns: loss and priority of each sample (B,), and the mean Q.

        With C51 the loss is the cross entropy and the priority KL(target || prediction); without,
        both come from the TD error.
        """
        batch = torch.arange(len(obs), device=obs.device)
        with torch.no_grad(), self.autocast():
            next_actions = self.q_values(self.online(next_obs)).argmax(1)
            next_out = self.target(next_obs_target)[batch, next_actions]  # (B, atoms)
        with self.autocast():
            out = self.online(obs)
        chosen = out[batch, actions]  # (B, atoms)
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

    # MOOSS

    def mooss_batch(self, stacks, actions, rewards, valid, weights, index):
        """Masked query observations, and keys from another view of the same ones."""
        query_obs = augment(stacks, self.args)  # (B * F, C, H, W)
        query_obs *= ~self.masks(index)  # (B * F, 1, H, W)
        keys = self.encode_keys(augment(stacks, self.args))  # (B * F, d)
        # Zeros for the row that closes an episode, whose action -1 `F.one_hot` would refuse.
        every_action = torch.arange(self.num_actions, device=self.device)
        one_hot = (actions[..., None] == every_action).float()  # (B, F, A)
        if not self.args.aux_is_weights:  # A5
            weights = torch.ones_like(weights)
        return query_obs, keys, one_hot, rewards[..., None], valid, weights

    @torch.no_grad()
    def encode_keys(self, key_obs):
        """Unmasked observations through the momentum encoder: (B * F, C, H, W) to (B * F, d)."""
        with self.autocast():
            return full_precision(self.target.state(key_obs))

    def mooss_loss(self, masked_obs, keys, actions, rewards, valid, weights):
        """L_MOOSS of a batch of sequences, and the similarity (B*F, B*F) that it ranks."""
        args = self.args
        with self.autocast():
            states = self.online.state(masked_obs)
            states = states.unflatten(0, (-1, args.seq_len))  # (B, F, d)
            queries = self.decoder(states, actions, rewards)
        similarity = self.similarity(full_precision(queries.flatten(0, 1)), keys)
        loss = temporal_contrastive_loss(
            similarity, args.seq_len, args.temporal_window, args.tau0, args.tau_step,
            args.level_reduction, weights, valid)
        return loss, similarity

    def similarity(self, queries, keys):
        """q^T W k of all queries (rows) and keys (columns), each (B * F, d): (B * F, B * F)."""
        if self.args.normalize_embeddings:  # D3
            queries = F.normalize(queries, dim=1, eps=1e-3)
            keys = F.normalize(keys, dim=1, eps=1e-3)
        return queries @ self.bilinear @ keys.T

    # Targets and metrics

    def update_targets(self, index):
        """Move Q target and key encoder, which are one network, towards the online network."""
        if index % self.args.target_update_period == 0:
            ema_update(self.target, self.online, self.args.target_ema)
            # The noise goes with the copy.
            for copied, buffer in zip(self.target.buffers(), self.online.buffers()):
                copied.copy_(buffer)

    @torch.no_grad()
    def mooss_metrics(self, similarity, valid, index):
        """What the queries found; the loss without importance weights, which change over a run."""
        args = self.args
        is_valid = valid.flatten()
        best_key = similarity.masked_fill(~is_valid, -math.inf).argmax(1)
        own_key = torch.arange(len(similarity), device=self.device)
        found = (best_key == own_key) & is_valid
        loss = temporal_contrastive_loss(
            similarity, args.seq_len, args.temporal_window, args.tau0, args.tau_step,
            args.level_reduction, valid=valid)
        return {
            "losses/mooss": loss,
            "mooss/mask_fraction": self.masks(index).float().mean(),
            "mooss/valid_fraction": valid.float().mean(),
            "mooss/top1_accuracy": found.sum() / is_valid.sum(),
            "mooss/rank_accuracy": rank_accuracy(
                similarity, args.seq_len, args.temporal_window, valid),
        }

    @torch.no_grad()
    def encoder_metrics(self, obs):
        """How far the states of a batch differ, and the share of features that are always zero.

        Base has no states: its features take their place.
        """
        with self.autocast():
            features = self.online.features(obs)
            states = self.online.projection(features) if self.args.aux_weight > 0 else features
        return {
            "encoder/state_std": states.float().std(0).mean(),
            # The minimum, which became 0, is that of a dead feature as soon as there is one.
            "encoder/dead_features": (features == 0).all(0).float().mean(),
        }


def load_agent(path, device="cpu"):
    """The agent of a checkpoint file, and the step at which it was saved."""
    return common.load_agent(path, __file__, Args, Agent, device)


# ---------------------------------------------------------------------------------------- pictures
@torch.no_grad()
def mooss_pictures(agent, replay, index):
    """What a MOOSS step sees and finds, as pictures by name."""
    args = agent.args
    # A look must not change the run: the random streams go on as if nobody had looked.
    on_cuda = agent.device.type == "cuda"
    with torch.random.fork_rng([agent.device] if on_cuda else []):
        rows, weights = replay.sample(args.batch_size, 0.0)
        actions, rewards, valid = common.upload(replay.sequences(rows), agent.device)
        weights = common.upload(weights, agent.device)
        stacks = agent.stacks(replay, rows, args.seq_len)
        batch = agent.mooss_batch(stacks, actions, rewards, valid, weights, index)
        obs = augment(stacks, args)
    masked_obs = obs * ~agent.masks(index)
    _, similarity = agent.mooss_loss(*batch)
    return {
        "mooss/masked_observations": picture_of_masks(
            obs, masked_obs, args.seq_len, agent.obs_shape[1]),
        "mooss/query_key_similarity": picture_of_similarity(similarity, args.seq_len),
    }


def picture_of_masks(obs, masked_obs, seq_len, channels):
    """Eight newest frames of a sequence above what is left of them: (16, C, H, W) in bytes."""
    shown = torch.linspace(0, seq_len - 1, 8).long()
    above = obs[shown, -channels:]
    below = masked_obs[shown, -channels:]
    pair = torch.cat([above, below])
    large_enough = math.ceil(160 / pair.shape[-1])
    pair = F.interpolate(pair, scale_factor=large_enough)
    pair = (255 * pair / pair.max().clamp(min=1e-6)).byte()
    return F.pad(pair, (0, 8, 0, 8), value=255)  # frames do not run into each other


def picture_of_similarity(similarity, seq_len):
    """How similar queries (rows) and keys (columns) of a sequence are: (1, 1, H, W) in bytes."""
    mean = within_sequences(similarity, seq_len).mean(0)  # over the sequences of the batch
    return common.heat_map(mean)


# -------------------------------------------------------------------------------------- evaluation
def evaluate(agent, args, device, step, keep_going, video=None):
    """Full games, unclipped, without noise, all at once: a list of (score, length).

    Their seeds follow from (seed, step). `keep_going(done)` is asked before every step; when it
    says no, there is no result (None).
    """
    games = range(args.eval_episodes)
    seeds = [common.derive_seed(args.seed, "evaluation", step, game) for game in games]
    dice = [np.random.default_rng(seed) for seed in seeds]
    envs = []
    obs = []
    for seed in seeds:  # a hundred games take a while to start
        if not keep_going(0):
            return None
        envs.append(make_env(args, device, training=False))
        obs.append(envs[-1].reset(seed=seed)[0])
    scores = [0.0 for _ in games]
    lengths = [0 for _ in games]
    film = []
    playing = list(games)
    while playing:
        if not keep_going(len(games) - len(playing)):
            return None
        if video and 0 in playing:
            film.append(envs[0].render())  # (210, 160, 3)
        # On a GPU the batch keeps its shape: for a new one, the convolutions are tuned anew.
        shown = list(playing) if device.type == "cpu" else games
        batch = np.stack([obs[game] for game in shown])
        for game, action in zip(shown, agent.act(batch)):
            if game not in playing:
                continue
            if dice[game].random() < args.eval_epsilon:
                action = dice[game].integers(agent.num_actions)
            outcome = envs[game].step(int(action))
            obs[game], reward, terminated, truncated, _ = outcome
            scores[game] += float(reward)
            lengths[game] += 1
            if terminated or truncated:
                envs[game].close()
                playing.remove(game)
    if video:
        common.write_video(video, film, fps=15, enlarge=2)
    return list(zip(scores, lengths))


def verdict(args, episodes):
    """The mean score; for games of the benchmark also human-normalised, with the paper's scores."""
    text = common.mean_std(episodes)
    published = common.published_scores("atari100k", args.env_id)
    if published:
        mean = np.mean([score for score, _ in episodes])
        normalised = (mean - published["Random"]) / (published["Human"] - published["Random"])
        names = ("MOOSS", "Base", "Random", "Human")
        scores = [f"{name} {published[name]}" for name in names]
        text += f"; human-normalised {normalised:.3f}; the paper: {', '.join(scores)}"
    return text


# -------------------------------------------------------------------------------------------- main
PACKAGES = ("torch", "numpy", "gymnasium", "ale-py")  # a run records their versions


@dataclasses.dataclass
class Counters:
    """Where a run is. A checkpoint holds it."""

    step: int = 0  # agent steps: the x-axis of everything
    update: int = 0  # updates
    game: int = 0  # number of the game that is being played
    actions: list = dataclasses.field(default_factory=list)  # its actions so far
    evaluated_at: int = -1  # step of the last evaluation


def main(args):
    args = resolve_args(args)
    if args.eval_only:
        own_flags = ("seed", "eval_episodes", "eval_epsilon")
        return common.evaluate_only(args, load_agent, evaluate, own_flags)
    folder = common.RunFolder(args, __file__)
    folder.check()
    device = common.pick_device(args.device)
    common.configure_torch(args.seed, device, args.torch_deterministic)
    env = make_env(args, device)
    obs_shape = env.observation_space.shape  # (frame_stack, C, H, W)
    num_actions = int(env.action_space.n)
    replay = common.place_replay(
        args.replay_device, device, SequenceReplay,
        args.buffer_size, obs_shape[1:], args.frame_stack, args.seq_len, args.multi_step)
    agent = Agent(args, obs_shape, num_actions, device)

    stop = common.StopRequest()
    run_dir = folder.claim(common.provenance(__file__, device, PACKAGES))
    learning_steps = max(0, args.total_timesteps - args.min_replay)
    updates = args.updates_per_step * math.ceil(learning_steps / args.replay_period)
    counters, logs = folder.restore(agent, replay, Counters())
    updates_left = max(0, updates - counters.update)
    common.print_plan(args, run_dir, agent, replay, PAPER, updates_left)
    resumed_at = counters.step
    logger = common.RunLogger(run_dir, args, counters.step, logs)
    progress = common.Progress(args, counters.step, stop)

    # A game is its seed and its actions: one that was half played is played again.
    seed = common.derive_seed(args.seed, "training", counters.game)
    obs, _ = env.reset(seed=seed)
    score = 0.0
    last_score = None
    for action in counters.actions:
        obs, reward, life_lost, _, _ = env.step(action)
        score += float(reward)
        if life_lost:
            obs, _ = env.reset()
    if replay.newest_row < 0:  # a checkpoint of step 0 holds this frame already
        replay.begin_episode(obs[-1])

    while True:
        step = counters.step
        finished = step >= args.total_timesteps
        if finished and counters.evaluated_at == step:
            break
        # Not again after a resume: what was done at this step is in the checkpoint.
        evaluation_due = step != counters.evaluated_at and (
            finished or common.due(step, args.eval_every))
        checkpoint_due = step > resumed_at and common.due(step, args.checkpoint_every)
        if evaluation_due:
            video = run_dir / "videos" / f"step_{step:09d}.mp4" if args.capture_video else None
            episodes = evaluate(agent, args, device, step, progress.keep_going, video)
            if episodes is not None:  # otherwise a signal came: it is repeated after a resume
                counters.evaluated_at = step
                logger.evaluation(step, counters.update, episodes)
                progress.bar.write(f"step {step:,}: score {verdict(args, episodes)}")
        if checkpoint_due or finished or stop.signal:
            if args.aux_weight > 0 and counters.update > 0:
                logger.pictures(step, mooss_pictures(agent, replay, counters.update))
            folder.save(agent, replay, counters, logger)
        if stop.signal or finished:
            break

        # Act, learn, then step the environment: on CUDA an update only queues kernels, and the
        # emulator runs while the GPU computes.
        random_action = step < args.min_replay
        if not args.noisy:
            random_action |= bool(torch.rand(()) < args.epsilon)
        if random_action:
            action = int(torch.randint(num_actions, ()))
        else:
            action = int(agent.act(obs, noisy=args.noisy))
        counters.step += 1
        if step >= args.min_replay and step % args.replay_period == 0:
            first, last = args.priority_correction
            share = (step - args.min_replay) / (args.total_timesteps - args.min_replay)
            beta = first + (last - first) * share
            for _ in range(args.updates_per_step):
                log = counters.update % args.log_every == 0
                agent.update(replay, counters.update, beta, log)
                counters.update += 1
                if log:
                    common.require_finite(agent, counters.step, run_dir)
                    logger.train(counters.step, counters.update, agent.metrics)
        progress.show(counters.step, counters.update, {
            "score": last_score,
            "rl": agent.metrics.get("losses/rl"),
            "mooss": agent.metrics.get("losses/mooss"),
        })

        obs, reward, terminated, _, info = env.step(action)
        counters.actions.append(action)
        score += float(reward)
        limit = args.reward_clip or math.inf
        clipped = float(np.clip(reward, -limit, limit))
        replay.add(action, clipped, terminated, obs[-1])
        if terminated:
            game_over = info["game_over"]
            if game_over:
                logger.episode(counters.step, score)
                last_score = score
                score = 0.0
                counters.game += 1
                counters.actions = []
            # A lost life ends only the episode: the game goes on, without a new seed.
            seed = common.derive_seed(args.seed, "training", counters.game)
            obs, _ = env.reset(seed=seed if game_over else None)
            replay.begin_episode(obs[-1])

    progress.bar.close()
    stop.close()
    logger.close()
    env.close()
    common.print_end(args, run_dir, stop)
    return 128 + stop.signal if stop.signal else 0


if __name__ == "__main__":
    common.exit_with(lambda: main(common.parse_args(Args, fill_presets)))
