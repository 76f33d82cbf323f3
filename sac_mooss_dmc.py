"""MOOSS on the DeepMind Control Suite: SAC from pixels with a masked, ranked temporal contrastive
loss beside it. Paper: Sun et al., "MOOSS: Mask-Enhanced Temporal Contrastive Learning for Smooth
State Evolution in Visual Reinforcement Learning" (WACV 2025).

Marks such as `D7` are rows of the ledger of details, benchmark/LEDGER.md.

    # two CPU cores, about two hours
    python sac_mooss_dmc.py --env-id cartpole-swingup --preset laptop
    # the paper's run: a GPU and some hours
    python sac_mooss_dmc.py --env-id reacher-easy --seed 1
    # the paper's Base agent: the same without MOOSS
    python sac_mooss_dmc.py --env-id reacher-easy --aux-weight 0 --exp-name base
    # go on after a stop of any kind
    python sac_mooss_dmc.py --env-id reacher-easy --seed 1 --resume
    # evaluate a saved agent and film it
    python sac_mooss_dmc.py --eval-only --checkpoint runs/reacher-easy__mooss__s1/checkpoint.pt
    # watch a run
    tensorboard --logdir runs

Letters in the comments on shapes: B batch, F frames of a sequence, C channels of an observation (3
for each frame of its stack), H and W height and width, d dimension of a state, A dimension of an
action, L temporal window.
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
    """SAC + MOOSS on DeepMind Control.

    None in the source: the preset's value, else the paper's for the task; --help shows it.
    """

    env_id: str = "reacher-easy"  # task of the suite: domain-task
    seed: int = 1  # of networks, environment, replay and masks
    exp_name: str = "mooss"  # name of the variant, part of the run folder's name
    run_root: str = "runs"  # folder that holds the run folders
    # the paper's tables, the authors' code where it differs (ledger D), or sizes for a CPU
    preset: Literal["paper", "authors", "laptop"] = "paper"
    total_timesteps: int = 100_000  # length of the run (env steps)
    eval_every: int = 5000  # time between evaluations (env steps)
    eval_episodes: int = None  # episodes per evaluation
    checkpoint_every: int = 10_000  # time between checkpoints (env steps); 0: only at the end
    log_every: int = 100  # time between rows of train.csv (updates)
    resume: bool = False  # continue the run in its folder; begin it if there is none
    eval_only: bool = False  # evaluate and film the agent of --checkpoint, and leave
    checkpoint: str | None = None  # checkpoint file for --eval-only
    capture_video: bool = False  # save an mp4 of the first episode of every evaluation
    track: bool = False  # log to Weights & Biases too
    wandb_project: str = "mooss"  # W&B project
    wandb_entity: str | None = None  # W&B team or user
    wandb_group: str | None = None  # W&B group of runs
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    replay_device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: on the GPU when it fits
    torch_deterministic: bool = False  # deterministic kernels on CUDA too (slower)
    compile: bool = False  # torch.compile the losses
    amp: Literal["none", "bf16"] = "none"  # networks in bfloat16, losses in fp32

    # Observations and replay

    frame_stack: int = 3  # frames in an observation (c / 3)
    render_size: int = None  # side of a rendered frame (pixels)
    image_size: int = None  # side of a cropped observation, H = W (pixels)
    camera_id: int = 0  # camera of the suite
    action_repeat: int = None  # env steps per agent step
    # random augmentations; without crop the centre is taken
    augmentations: tuple[Literal["crop", "intensity"], ...] = ("crop", "intensity")
    intensity_scale: float = 0.05  # observations times 1 + this * clip(N(0, 1), -2, 2)
    rl_intensity: bool = False  # random intensity on the RL batch too (D9)
    crop_per_sequence: bool = False  # one crop for an auxiliary sequence (D10)
    pixel_scale: float = None  # divisor of the pixels (D11)
    buffer_size: int = 100_000  # frames kept in the replay (agent steps)
    init_steps: int = 1000  # random actions before learning starts (agent steps)

    # SAC

    batch_size: int = None  # batch for policy learning
    optimizer: Literal["adam", "adamw"] = "adam"  # optimiser of every module
    rl_lr: float = None  # learning rate of actor and critic
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
    num_filters: int = None  # filters of each conv layer
    hidden_dim: int = None  # hidden units of actor and critic

    # MOOSS

    aux_weight: float = 0.1  # weight lambda of the MOOSS loss; 0 is the paper's Base
    aux_batch_size: int = None  # sequences per auxiliary batch
    aux_lr: float = None  # learning rate of the MOOSS step
    aux_warmup_steps: int = 6000  # linear warm-up of --aux-lr (updates; 0: constant rate; D7)
    aux_lr_decay: bool = True  # after the warm-up --aux-lr falls as 1 / sqrt(update) (D7)
    max_grad_norm: float = 10.0  # gradient norm limit of the MOOSS step (D14)
    seq_len: int = 16  # sequence length F (agent steps)
    cube_size: int = 7  # spatial size of a cube, h = w (pixels)
    cube_len: int = None  # temporal length f of a cube (agent steps)
    mask_type: Literal["walk", "cube"] = "walk"  # a random walk, or uniform cubes as in MLR
    mask_ratio: float = 0.5  # share p_m of the cubes that is zeroed
    walk_connectivity: Literal[26, 6] = 26  # neighbours of an inner cube (D4)
    walk_root: Literal["random", "fixed"] = None  # start of the walk (D5)
    share_mask: bool = None  # one mask for the whole batch (D6)
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
    target_update_period: int = None  # time between key encoder updates (updates; D8)
    target_ema: float = None  # EMA m of the key encoder


PAPER = dict(
    eval_episodes=10, render_size=100, image_size=84, action_repeat=4, pixel_scale=255.0,
    batch_size=512, rl_lr=1e-3, num_filters=64, hidden_dim=1024,
    aux_batch_size=128, aux_lr=5e-4, cube_len=8, walk_root="random", share_mask=False,
    temporal_window=6, target_update_period=1, target_ema=0.95)
TASK_PRESETS = {
    "finger-spin": dict(action_repeat=2),
    "cartpole-swingup": dict(action_repeat=8, cube_len=4),
    "reacher-easy": dict(cube_len=4),
    "cheetah-run": dict(rl_lr=2e-4, aux_lr=1e-4),
    "walker-walk": dict(action_repeat=2, target_ema=0.9),
}
PRESETS = {
    "paper": {},
    "authors": dict(
        temporal_window=5, walk_root="fixed", share_mask=True, target_update_period=2,
        pixel_scale=1.0),
    "laptop": dict(
        eval_episodes=3, render_size=50, image_size=42, batch_size=192, num_filters=48,
        hidden_dim=512, aux_batch_size=24),
}


def fill_presets(args):
    """What is None takes its value from the preset, else from the task, else from the paper."""
    env_id = args.env_id
    if env_id.startswith("dm_control/"):
        env_id = env_id.removeprefix("dm_control/").removesuffix("-v0")
    values = {**PAPER, **TASK_PRESETS.get(env_id, {}), **PRESETS[args.preset]}
    unset = {name: value for name, value in values.items() if getattr(args, name) is None}
    return dataclasses.replace(args, env_id=env_id, **unset)


def resolve_args(args):
    """The arguments with every preset filled in; values that cannot work are refused."""
    args = fill_presets(args)
    common.check_names(args)
    common.check_ranges(args, {
        "seed": (0, 2**32 - 1),
        "camera_id": (-1, 99),
        "total_timesteps eval_every log_every": (1, 10**12),
        "checkpoint_every aux_warmup_steps": (0, 10**12),
        "eval_episodes init_steps batch_size aux_batch_size": (1, 10**6),
        "actor_update_freq critic_target_update_freq target_update_period": (1, 10**9),
        "action_repeat seq_len": (1, 1000),
        "frame_stack": (1, 16),
        "render_size": (15, 1024),
        "image_size": (15, args.render_size),
        "buffer_size": (2 * args.seq_len + args.frame_stack, 10**8),
        "num_filters hidden_dim state_dim head_dim": (1, 10**5),
        "decoder_depth": (1, 100),
        "temporal_window": (0, args.seq_len - 1),
        "gamma critic_ema critic_encoder_ema target_ema mask_ratio": (0, 1),
        "rl_lr aux_lr alpha_lr intensity_scale": (0, 1),
        "beta1 beta2 alpha_beta1 alpha_beta2": (0, 0.999999),
        "aux_weight tau_step": (0, 1e3),
        "tau0 pixel_scale init_temperature max_grad_norm": (1e-6, 1e6),
    })
    common.check_divides(
        args, image_size="cube_size", seq_len="cube_len", state_dim="decoder_heads")
    common.require(
        args.aux_weight == 0 or args.init_steps >= args.seq_len,
        f"--init-steps {args.init_steps} collect no sequence of --seq-len {args.seq_len} steps")
    common.require(not args.eval_only or args.checkpoint, "--eval-only needs --checkpoint PATH")
    return args


# ------------------------------------------------------------------------------------- environment
class ActionRepeat(gym.Wrapper):
    """Take an action several times and sum its rewards.

    Frames are rendered by the wrapper around this one, so only after the last of these steps.
    """

    def __init__(self, env, repeat):
        super().__init__(env)
        self.repeat = repeat

    def step(self, action):
        total_reward = 0.0
        for _ in range(self.repeat):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total_reward += reward
            if terminated or truncated:
                break
        return obs, total_reward, terminated, truncated, info


class PixelObservation(gym.ObservationWrapper):
    """What the network sees of a task: a frame (3, size, size) in bytes."""

    def __init__(self, env, size, camera_id):
        super().__init__(env)
        self.size = size
        self.camera_id = camera_id
        self.observation_space = gym.spaces.Box(0, 255, (3, size, size), np.uint8)

    def observation(self, _):
        physics = self.unwrapped.physics
        frame = physics.render(self.size, self.size, camera_id=self.camera_id)  # (H, W, 3)
        return frame.transpose(2, 0, 1)


VIDEO_SIZE = 320


def make_env(args, device):
    """A task with observations (frame_stack, 3, render_size, render_size), actions in [-1, 1]."""
    common.use_headless_gl(device)
    # Only now: this imports dm_control, which binds itself to the GL backend for good.
    import shimmy.utils.envs_configs

    tasks = ["-".join(task) for task in shimmy.utils.envs_configs.DM_CONTROL_SUITE_ENVS]
    common.require_known("--env-id", args.env_id, tasks)
    # These are for `env.render()`, which films for people; the network has a size of its own.
    film = dict(height=VIDEO_SIZE, width=VIDEO_SIZE, camera_id=args.camera_id)
    env = gym.make(
        f"dm_control/{args.env_id}-v0", render_mode="rgb_array", render_kwargs=film,
        disable_env_checker=True)
    check_task(args, env.unwrapped)
    env = gym.wrappers.RescaleAction(env, -1.0, 1.0)
    env = ActionRepeat(env, args.action_repeat)
    env = PixelObservation(env, args.render_size, args.camera_id)
    # At a reset the first frame is repeated.
    return gym.wrappers.FrameStackObservation(env, args.frame_stack, padding_type="reset")


def check_task(args, task):
    """Refuse what this task of the suite cannot do."""
    model = task.physics.model
    largest = min(model.vis.global_.offwidth, model.vis.global_.offheight)
    limit = task._step_limit  # env steps
    common.require(
        args.camera_id < model.ncam,
        f"--camera-id {args.camera_id} does not exist: {args.env_id} has -1 (free) to "
        f"{model.ncam - 1}")
    common.require(
        args.render_size <= largest,
        f"--render-size {args.render_size} is above this task's {largest}")
    common.require(
        limit < math.inf, f"--env-id {args.env_id} has no time limit: episodes would never end")
    common.require(
        limit // args.action_repeat >= args.seq_len,
        f"an episode of {limit:.0f} env steps at --action-repeat {args.action_repeat} is shorter "
        f"than --seq-len {args.seq_len}")


# ------------------------------------------------------------------------------------------ replay
class SequenceReplay:
    """Every frame once, as bytes; stacks, next observations and sequences are put together here.

    A row is one agent step: a frame, the action taken at it, its reward, and whether that ended the
    episode. The newest row waits for its action. An episode's last frame is a row without an
    action and closes the episode. Rows are numbered from the start of the run and, once they have
    their action, never change; row r lives in slot r % capacity.
    """

    columns = ("frames", "actions", "rewards", "terminated", "episode_starts")

    def __init__(self, capacity, frame_shape, action_dim, frame_stack, device):
        self.capacity = capacity
        self.frame_stack = frame_stack
        self.device = device
        self.frames = torch.zeros(capacity, *frame_shape, dtype=torch.uint8, device=device)
        self.actions = torch.zeros(capacity, action_dim, device=device)
        self.rewards = torch.zeros(capacity, device=device)
        self.terminated = torch.zeros(capacity, dtype=torch.bool, device=device)
        # The row at which a row's episode began. It stays on the CPU, where `sample` reads it
        # without waiting for the GPU.
        self.episode_starts = torch.zeros(capacity, dtype=torch.long)
        self.newest_row = -1
        self.newest_start = 0

    def begin_episode(self, frame):
        """Store the first frame of an episode."""
        self.newest_start = self.newest_row + 1
        self._append(frame)

    def add(self, action, reward, terminated, next_frame):
        """Complete the newest row by what was done at it, and store the frame that followed."""
        slot = self.newest_row % self.capacity
        self.actions[slot] = common.upload(torch.as_tensor(action), self.device)
        self.rewards[slot].fill_(reward)
        self.terminated[slot].fill_(terminated)
        self._append(next_frame)

    def _append(self, frame):
        self.newest_row += 1
        slot = self.newest_row % self.capacity
        self.frames[slot] = common.upload(torch.as_tensor(frame), self.device)
        self.actions[slot].fill_(0.0)
        self.rewards[slot].fill_(0.0)
        self.terminated[slot].fill_(False)
        self.episode_starts[slot] = self.newest_start

    @property
    def oldest_row(self):
        return max(0, self.newest_row + 1 - self.capacity)

    def sample(self, count, length=1):
        """Rows (count,) with `length` later rows in their episode, drawn uniformly."""
        found = torch.zeros(0, dtype=torch.long)
        for _ in range(10_000):
            rows = torch.randint(self.oldest_row, self.newest_row - length + 1, (count,))
            starts = self.episode_starts[rows % self.capacity]
            starts_at_end = self.episode_starts[(rows + length) % self.capacity]
            oldest_stacked = torch.maximum(starts, rows - self.frame_stack + 1)
            # A sequence stays within an episode (D16, D17), and no frame of it is overwritten yet.
            good = (starts == starts_at_end) & (oldest_stacked >= self.oldest_row)
            # Bad rows are drawn again: they are few, and the good ones stay uniform.
            found = torch.cat([found, rows[good]])
            if len(found) >= count:
                return found[:count]
        raise common.UsageError(f"no episode holds {length} steps: use a smaller --seq-len")

    def steps(self, rows):
        """What was done at `rows` (...): actions (..., A), rewards (...), terminated (...)."""
        slots = common.upload(rows % self.capacity, self.device)
        return self.actions[slots], self.rewards[slots], self.terminated[slots]

    def observations(self, rows):
        """Stacks of frames, as bytes: rows (...) -> (..., frame_stack * C, H, W)."""
        ages = torch.arange(self.frame_stack - 1, -1, -1)  # oldest frame first
        starts = self.episode_starts[rows % self.capacity]
        # Before an episode's first frame, that frame is repeated.
        stacks = torch.maximum(rows[..., None] - ages, starts[..., None])  # (..., frame_stack)
        slots = common.upload(stacks % self.capacity, self.device)
        frames = self.frames.index_select(0, slots.flatten())
        return frames.unflatten(0, slots.shape).flatten(-4, -3)

    def state_dict(self):
        """All that the columns of complete rows do not say."""
        # A copy: a view would bring all frames into the file.
        newest_frame = self.frames[self.newest_row % self.capacity].cpu().clone()
        return {
            "newest_row": self.newest_row,
            "newest_start": self.newest_start,
            "newest_frame": newest_frame,
        }

    def load_state_dict(self, state):
        self.newest_row = state["newest_row"] - 1
        self.newest_start = state["newest_start"]
        self._append(state["newest_frame"])


# ------------------------------------------------------------------------------------ augmentation
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


def centre_crop(images, size):
    """The window in the middle: (B, ..., C, H, W) -> (N, C, size, size)."""
    margin = (images.shape[-1] - size) // 2
    return images[..., margin:margin + size, margin:margin + size].flatten(0, -4)


def scale(pixels, factor):
    """Bytes (N, C, H, W) times a factor, as floats in the memory layout that convolutions like."""
    floats = pixels.to(torch.get_default_dtype(), memory_format=torch.channels_last)
    return floats.mul_(factor)


def augment(images, args, device, intensity, crop_per_sequence=False):
    """Bytes (B, ..., C, H, W) to observations (N, C, h, w) on the training device, at random."""
    if "crop" in args.augmentations:
        pixels = random_crop(images, args.image_size, crop_per_sequence)
    else:
        pixels = centre_crop(images, args.image_size)
    factor = 1 / args.pixel_scale  # D11
    if intensity and "intensity" in args.augmentations:
        noise = torch.randn(len(pixels), 1, 1, 1, device=device).clamp(-2, 2)
        factor = factor * (1 + args.intensity_scale * noise)
    return scale(common.upload(pixels, device), factor)


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
def init_weights(module):
    """Orthogonal linear layers; convs with an orthogonal centre and zeros around it; no biases."""
    if isinstance(module, nn.Linear):
        nn.init.orthogonal_(module.weight)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Conv2d):
        nn.init.zeros_(module.weight)
        middle = module.kernel_size[0] // 2
        centre = module.weight.data[:, :, middle, middle]
        nn.init.orthogonal_(centre, nn.init.calculate_gain("relu"))
        nn.init.zeros_(module.bias)


def full_precision(outputs):
    """What networks leave in bf16, under --amp, as the floats that losses are computed in."""
    return outputs.to(torch.get_default_dtype())


def mlp(inputs, hidden, outputs):
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(),
        nn.Linear(hidden, hidden), nn.ReLU(),
        nn.Linear(hidden, outputs))


class Encoder(nn.Module):
    """f_theta: observation (B, C, H, W) to state (B, d).

    The actor shares the convs and has a projection of its own.
    """

    def __init__(self, channels, image_size, num_filters, state_dim):
        super().__init__()
        layers = [nn.Conv2d(channels, num_filters, 3, stride=2), nn.ReLU(inplace=True)]
        for _ in range(3):
            layers += [nn.Conv2d(num_filters, num_filters, 3), nn.ReLU(inplace=True)]
        self.convs = nn.Sequential(*layers, nn.Flatten())
        # The first conv halves the side, each other one takes 2 pixels: 35 for images of 84 x 84.
        side = (image_size - 3) // 2 + 1 - 6
        self.feature_count = num_filters * side**2
        self.projection = nn.Sequential(
            nn.Linear(self.feature_count, state_dim), nn.LayerNorm(state_dim))

    def forward(self, obs):
        return self.projection(self.convs(obs))


LOG_STD_MIN = -10
LOG_STD_MAX = 2


class Actor(nn.Module):
    """Tanh-squashed Gaussian policy on the critic's conv features."""

    def __init__(self, feature_count, state_dim, hidden_dim, action_dim):
        super().__init__()
        self.projection = nn.Sequential(
            nn.Linear(feature_count, state_dim), nn.LayerNorm(state_dim))
        self.head = mlp(state_dim, hidden_dim, 2 * action_dim)

    def forward(self, features):
        """Mean and log standard deviation (B, A) before the tanh."""
        outputs = full_precision(self.head(self.projection(features)))
        mean, log_std = outputs.chunk(2, dim=-1)
        share = (torch.tanh(log_std) + 1) / 2
        return mean, LOG_STD_MIN + (LOG_STD_MAX - LOG_STD_MIN) * share

    def sample(self, features, noise):
        """Actions (B, A) and log-probabilities (B, 1) for standard normal `noise` (B, A)."""
        mean, log_std = self(features)
        action = torch.tanh(mean + log_std.exp() * noise)
        log_normal = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
        log_prob = log_normal - torch.log(1 - action**2 + 1e-6)
        return action, log_prob.sum(-1, keepdim=True)


class Critic(nn.Module):
    """Two Q functions of state and action, and the encoder that makes states."""

    def __init__(self, encoder, state_dim, hidden_dim, action_dim):
        super().__init__()
        self.encoder = encoder
        self.heads = nn.ModuleList([mlp(state_dim + action_dim, hidden_dim, 1) for _ in range(2)])

    def forward(self, state, action):
        """Two Q values (B, 1)."""
        state_action = torch.cat([state, action], dim=-1)
        return [full_precision(head(state_action)) for head in self.heads]


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


# ------------------------------------------------------------------------------------------- agent
class Agent(nn.Module):
    """Networks, optimisers, and one update told step by step. Losses map tensors to tensors."""

    def __init__(self, args, obs_shape, action_dim, device):
        super().__init__()
        self.args = args
        self.obs_shape = tuple(obs_shape)  # (frame_stack, C, H, W) as rendered
        self.action_dim = action_dim
        self.shape = (self.obs_shape, action_dim)  # what a checkpoint needs to build it again
        self.unused = ("critic.heads", "critic_target", "log_alpha")  # by those who only act
        self.device = device
        channels = obs_shape[0] * obs_shape[1]
        encoder = Encoder(channels, args.image_size, args.num_filters, args.state_dim)
        self.critic = Critic(encoder, args.state_dim, args.hidden_dim, action_dim)
        self.actor = Actor(encoder.feature_count, args.state_dim, args.hidden_dim, action_dim)
        self.critic.apply(init_weights)
        self.actor.apply(init_weights)
        self.critic_target = copy.deepcopy(self.critic).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(args.init_temperature)))  # D18
        if args.aux_weight > 0:
            self.key_encoder = copy.deepcopy(encoder).requires_grad_(False)
            self.decoder = PredictiveDecoder(
                args.state_dim, action_dim, args.decoder_depth, args.decoder_heads,
                args.head_dim, args.decoder_inputs)
            self.bilinear = nn.Parameter(torch.rand(args.state_dim, args.state_dim))  # W
            self.masks = MaskBank(args, args.aux_batch_size, device)
        self.to(device, memory_format=torch.channels_last)

        optimizers = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
        adam = optimizers[args.optimizer]
        betas = (args.beta1, args.beta2)
        alpha_betas = (args.alpha_beta1, args.alpha_beta2)
        self.optimizers = {
            "critic": adam(self.critic.parameters(), args.rl_lr, betas, fused=True),
            "actor": adam(self.actor.parameters(), args.rl_lr, betas, fused=True),
            "alpha": adam([self.log_alpha], args.alpha_lr, alpha_betas, weight_decay=0, fused=True),
        }
        if args.aux_weight > 0:
            # The MOOSS step moves the critic's encoder too, with an Adam of its own (D14).
            self.aux_parameters = [
                *encoder.parameters(), *self.decoder.parameters(), self.bilinear]
            self.optimizers["aux"] = adam(self.aux_parameters, args.aux_lr, betas, fused=True)
        if args.compile:
            self.backward = common.compiled(self.backward)
        self.metrics = {}  # what an update leaves to log: tensors, which nobody waits for here

    def autocast(self):
        bf16 = self.args.amp == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=bf16)

    def images_per_update(self):
        """Encoder passes of an update; a backward pass counts as two."""
        args = self.args
        aux_images = 4 * args.aux_batch_size * args.seq_len if args.aux_weight > 0 else 0
        return 5.5 * args.batch_size + aux_images

    @torch.no_grad()
    def act(self, obs, deterministic=False):
        """Action (A,) for an observation (frame_stack, C, H, W) in bytes, or (N, A) for N."""
        obs = torch.as_tensor(obs)
        common.check_observation(obs, self.obs_shape)
        pixels = centre_crop(obs.view(-1, *self.obs_shape).flatten(1, 2), self.args.image_size)
        pixels = scale(common.upload(pixels, self.device), 1 / self.args.pixel_scale)
        with self.autocast():
            mean, log_std = self.actor(self.critic.encoder.convs(pixels))
        if not deterministic:
            mean = mean + log_std.exp() * torch.randn_like(mean)
        actions = torch.tanh(mean).cpu().numpy()
        return actions if obs.dim() == 5 else actions[0]

    def update(self, replay, index, log):
        """Update number `index`: critic, MOOSS, actor and temperature, then the target networks.

        Nothing here waits for the device. `log` asks for the metrics that cost something.
        """
        args = self.args
        rows = replay.sample(args.batch_size)  # (B,)
        action, reward, terminated = common.upload(replay.steps(rows), self.device)
        obs = augment(replay.observations(rows), args, self.device, args.rl_intensity)  # D9
        next_obs = augment(replay.observations(rows + 1), args, self.device, args.rl_intensity)
        noise = torch.randn(2, len(rows), self.action_dim, device=self.device)

        self.critic_step(obs, action, reward, terminated, next_obs, noise[0])
        if log:
            self.metrics |= self.encoder_metrics(obs)
        if args.aux_weight > 0:
            self.mooss_step(replay, index, log)
        if index % args.actor_update_freq == 0:  # D12
            self.actor_step(obs, noise[1])
        self.update_targets(index)

    def backward(self, loss_function, *inputs):
        """Put the gradients of a loss into its parameters; return what it returned, detached."""
        loss, outputs = loss_function(*inputs)
        loss.backward()
        return loss.detach(), {name: value.detach() for name, value in outputs.items()}

    # SAC

    def critic_step(self, *batch):
        self.optimizers["critic"].zero_grad()
        loss, outputs = self.backward(self.critic_loss, *batch)
        self.optimizers["critic"].step()
        self.metrics |= {"losses/critic": loss, "charts/learning_rate": self.args.rl_lr, **outputs}

    def critic_loss(self, obs, action, reward, terminated, next_obs, noise):
        """Twin soft Q loss; time limits bootstrap, real terminations cut."""
        with torch.no_grad(), self.autocast():
            next_features = self.critic.encoder.convs(next_obs)
            next_action, log_prob = self.actor.sample(next_features, noise)
            next_state = self.critic_target.encoder(next_obs)
            target_q1, target_q2 = self.critic_target(next_state, next_action)
            value = torch.minimum(target_q1, target_q2) - self.log_alpha.exp() * log_prob
            target = reward[:, None] + self.args.gamma * value * ~terminated[:, None]  # (B, 1)
        with self.autocast():
            q1, q2 = self.critic(self.critic.encoder(obs), action)
        loss = F.mse_loss(q1, target) + F.mse_loss(q2, target)
        outputs = {"sac/q1": q1.mean(), "sac/q2": q2.mean(), "sac/target_q": target.mean()}
        return loss, outputs

    def actor_step(self, obs, noise):
        """A step of actor and temperature.

        The critic's heads get gradients too; the critic's next step throws them away.
        """
        self.optimizers["actor"].zero_grad()
        self.optimizers["alpha"].zero_grad()
        _, outputs = self.backward(self.actor_loss, obs, noise)
        self.optimizers["actor"].step()
        self.optimizers["alpha"].step()
        self.metrics |= {**outputs, "sac/alpha": self.log_alpha.detach().exp()}

    def actor_loss(self, obs, noise):
        """Losses of actor and temperature; they do not reach the convs, which are the critic's."""
        with self.autocast():
            with torch.no_grad():
                features = self.critic.encoder.convs(obs)
                state = self.critic.encoder.projection(features)
            action, log_prob = self.actor.sample(features, noise)
            q1, q2 = self.critic(state, action)
        alpha = self.log_alpha.exp()
        actor_loss = (alpha.detach() * log_prob - torch.minimum(q1, q2)).mean()
        # The target entropy is -A.
        alpha_loss = (alpha * (-log_prob.detach() + self.action_dim)).mean()
        outputs = {
            "losses/actor": actor_loss,
            "losses/alpha": alpha_loss,
            "sac/entropy": -log_prob.mean(),
        }
        return actor_loss + alpha_loss, outputs

    # MOOSS

    def mooss_step(self, replay, index, log):
        """A step of its own on lambda * L_MOOSS, after the critic's (D14)."""
        args = self.args
        rows, actions, rewards = self.draw_sequences(replay)
        query_obs = self.augmented(replay, rows)  # (B * F, C, H, W)
        masks = self.masks(index)  # (B * F, 1, H, W)
        query_obs *= ~masks  # in place: a copy would be half a gigabyte at the paper's size
        keys = self.encode_keys(self.augmented(replay, rows))  # (B * F, d)

        optimizer = self.optimizers["aux"]
        optimizer.zero_grad()
        _, outputs = self.backward(self.mooss_loss, query_obs, keys, actions, rewards)
        grad_norm = nn.utils.clip_grad_norm_(self.aux_parameters, args.max_grad_norm)
        learning_rate = self.aux_learning_rate(index)
        optimizer.param_groups[0]["lr"] = learning_rate
        optimizer.step()

        similarity = outputs.pop("similarity")
        self.metrics |= {"mooss/lr": learning_rate, "mooss/grad_norm": grad_norm, **outputs}
        if log:
            own_key = torch.arange(len(similarity), device=self.device)
            best_key = similarity.argmax(1)
            self.metrics |= {
                "mooss/mask_fraction": masks.float().mean(),
                "mooss/top1_accuracy": (best_key == own_key).float().mean(),
                "mooss/rank_accuracy": rank_accuracy(
                    similarity, args.seq_len, args.temporal_window),
            }

    def draw_sequences(self, replay):
        """Sequences of the replay: rows (B, F), their actions (B, F, A) and rewards (B, F, 1)."""
        starts = replay.sample(self.args.aux_batch_size, self.args.seq_len)
        rows = starts[:, None] + torch.arange(self.args.seq_len)
        actions, rewards, _ = common.upload(replay.steps(rows), self.device)
        return rows, actions, rewards[..., None]

    def augmented(self, replay, rows):
        """The observations of sequences (B * F, C, H, W), augmented anew at every call."""
        images = replay.observations(rows)  # (B, F, C, H, W)
        return augment(images, self.args, self.device, True, self.args.crop_per_sequence)  # D10

    @torch.no_grad()
    def encode_keys(self, key_obs):
        """Unmasked observations through the momentum encoder: (B * F, C, H, W) to (B * F, d)."""
        with self.autocast():
            return full_precision(self.key_encoder(key_obs))

    def mooss_loss(self, masked_obs, keys, actions, rewards):
        """lambda * L_MOOSS of a batch of sequences, and the similarity (B*F, B*F) that it ranks."""
        args = self.args
        with self.autocast():
            states = self.critic.encoder(masked_obs)
            states = states.unflatten(0, (-1, args.seq_len))  # (B, F, d)
            queries = self.decoder(states, actions, rewards)
        similarity = self.similarity(full_precision(queries.flatten(0, 1)), keys)
        loss = temporal_contrastive_loss(
            similarity, args.seq_len, args.temporal_window, args.tau0, args.tau_step,
            args.level_reduction)
        return args.aux_weight * loss, {"losses/mooss": loss, "similarity": similarity}

    def similarity(self, queries, keys):
        """q^T W k of all queries (rows) and keys (columns), each (B * F, d): (B * F, B * F)."""
        if self.args.normalize_embeddings:  # D3
            queries = F.normalize(queries, dim=1, eps=1e-3)
            keys = F.normalize(keys, dim=1, eps=1e-3)
        return queries @ self.bilinear @ keys.T

    def aux_learning_rate(self, index):
        """D7: a linear rise from 0.0005 of the rate to all of it, then a fall as 1/sqrt(index)."""
        warmup = self.args.aux_warmup_steps
        if index < warmup:
            factor = 0.0005 + (1 - 0.0005) * index / warmup
        elif warmup > 0 and self.args.aux_lr_decay:
            factor = math.sqrt(warmup / index)
        else:
            factor = 1.0
        return factor * self.args.aux_lr

    # Targets and metrics

    def update_targets(self, index):
        """Move the target critic and the key encoder towards the networks that they follow."""
        args = self.args
        if index % args.critic_target_update_freq == 0:
            ema_update(self.critic_target.heads, self.critic.heads, args.critic_ema)
            ema_update(self.critic_target.encoder, self.critic.encoder, args.critic_encoder_ema)
        if args.aux_weight > 0 and index % args.target_update_period == 0:  # D8
            ema_update(self.key_encoder, self.critic.encoder, args.target_ema)

    @torch.no_grad()
    def encoder_metrics(self, obs):
        """How far the states of a batch differ, and the share of features that are always zero."""
        with self.autocast():
            features = self.critic.encoder.convs(obs)
            states = self.critic.encoder.projection(features)
        return {
            "encoder/state_std": states.float().std(0).mean(),
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
        rows, actions, rewards = agent.draw_sequences(replay)
        obs = agent.augmented(replay, rows)
        keys = agent.encode_keys(agent.augmented(replay, rows))
    masked_obs = obs * ~agent.masks(index)
    _, outputs = agent.mooss_loss(masked_obs, keys, actions, rewards)
    return {
        "mooss/masked_observations": picture_of_masks(
            obs, masked_obs, args.seq_len, agent.obs_shape[1]),
        "mooss/query_key_similarity": picture_of_similarity(
            outputs["similarity"], args.seq_len),
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
    """Deterministic episodes in an environment of their own (D13): a list of (return, length).

    Their seeds follow from (seed, step). `keep_going(done)` is asked before every step; when it
    says no, there is no result (None).
    """
    env = make_env(args, device)
    episodes = []
    film = []
    for episode in range(args.eval_episodes):
        seed = common.derive_seed(args.seed, "evaluation", step, episode)
        obs, _ = env.reset(seed=seed)
        score = 0.0
        length = 0
        done = False
        while not done:
            if not keep_going(episode):
                env.close()
                return None
            if video and episode == 0:
                film.append(env.render())  # (H, W, 3)
            action = agent.act(obs, deterministic=True)
            obs, reward, terminated, truncated, _ = env.step(action)
            score += float(reward)
            length += 1
            done = terminated or truncated
        episodes.append((score, length))
    env.close()
    if video:
        common.write_video(video, film, fps=25)
    return episodes


def verdict(args, episodes):
    """The mean return and, for tasks of the paper, its scores at 100,000 steps."""
    text = common.mean_std(episodes)
    published = common.published_scores("dmc100k", args.env_id)
    if published:
        scores = [f"{name} {published[name]['mean']:.0f}" for name in ("MOOSS", "Base")]
        text += f" (the paper at 100,000 steps: {', '.join(scores)})"
    return text


# -------------------------------------------------------------------------------------------- main
PACKAGES = ("torch", "numpy", "gymnasium", "shimmy", "dm_control", "mujoco")  # a run records them


@dataclasses.dataclass
class Counters:
    """Where a run is. A checkpoint holds it."""

    step: int = 0  # env steps: the x-axis of everything
    update: int = 0  # updates
    episode: int = 0  # number of the episode that is being played
    actions: list = dataclasses.field(default_factory=list)  # its actions so far
    evaluated_at: int = -1  # step of the last evaluation


def main(args):
    args = resolve_args(args)
    if args.eval_only:
        return common.evaluate_only(args, load_agent, evaluate, ("seed", "eval_episodes"))
    # Nothing in a DMC run depends on its length, so a resumed one may become longer or shorter.
    folder = common.RunFolder(args, __file__, may_change=("total_timesteps",))
    folder.check()
    device = common.pick_device(args.device)
    common.configure_torch(args.seed, device, args.torch_deterministic)
    env = make_env(args, device)
    obs_shape = env.observation_space.shape  # (frame_stack, C, H, W)
    action_dim = env.action_space.shape[0]
    replay = common.place_replay(
        args.replay_device, device, SequenceReplay,
        args.buffer_size, obs_shape[1:], action_dim, args.frame_stack)
    agent = Agent(args, obs_shape, action_dim, device)

    stop = common.StopRequest()
    run_dir = folder.claim(common.provenance(__file__, device, PACKAGES))
    updates = max(0, math.ceil(args.total_timesteps / args.action_repeat) - args.init_steps)
    counters, logs = folder.restore(agent, replay, Counters())
    updates_left = max(0, updates - counters.update)
    common.print_plan(args, run_dir, agent, replay, PAPER, updates_left)
    resumed_at = counters.step
    logger = common.RunLogger(run_dir, args, counters.step, logs)
    progress = common.Progress(args, counters.step, stop)

    # An episode is its seed (D19) and its actions: one that was half played is played again.
    obs, _ = env.reset(seed=common.derive_seed(args.seed, "training", counters.episode))
    episode_return = 0.0
    last_return = None
    for action in counters.actions:
        obs, reward, _, _, _ = env.step(np.array(action, np.float32))
        episode_return += float(reward)
    if replay.newest_row < 0:  # a checkpoint of step 0 holds this frame already
        replay.begin_episode(obs[-1])

    while True:
        step = counters.step
        finished = step >= args.total_timesteps
        if finished and counters.evaluated_at == step:
            break
        # Not again after a resume: what was done at this step is in the checkpoint.
        evaluation_due = step != counters.evaluated_at and (
            finished or common.due(step, args.eval_every, args.action_repeat))
        checkpoint_due = step > resumed_at and common.due(
            step, args.checkpoint_every, args.action_repeat)
        if evaluation_due:
            video = run_dir / "videos" / f"step_{step:09d}.mp4" if args.capture_video else None
            episodes = evaluate(agent, args, device, step, progress.keep_going, video)
            if episodes is not None:  # otherwise a signal came: it is repeated after a resume
                counters.evaluated_at = step
                logger.evaluation(step, counters.update, episodes)
                progress.bar.write(f"step {step:,}: return {verdict(args, episodes)}")
        if checkpoint_due or finished or stop.signal:
            if args.aux_weight > 0 and counters.update > 0:
                logger.pictures(step, mooss_pictures(agent, replay, counters.update))
            folder.save(agent, replay, counters, logger)
        if stop.signal or finished:
            break

        # Act, learn, then step the environment: on CUDA an update only queues kernels, and the
        # simulator runs while the GPU computes.
        counters.step += args.action_repeat
        if step < args.init_steps * args.action_repeat:
            action = (2 * torch.rand(action_dim) - 1).numpy()
        else:
            action = agent.act(obs)
            log = counters.update % args.log_every == 0
            agent.update(replay, counters.update, log)
            counters.update += 1
            if log:
                common.require_finite(agent, counters.step, run_dir)
                logger.train(counters.step, counters.update, agent.metrics)
        progress.show(counters.step, counters.update, {
            "return": last_return,
            "critic": agent.metrics.get("losses/critic"),
            "mooss": agent.metrics.get("losses/mooss"),
        })
        if not np.isfinite(action).all():  # a simulator would only crash
            common.require_finite(agent, counters.step, run_dir)

        obs, reward, terminated, truncated, _ = env.step(action)
        counters.actions.append(action.tolist())
        episode_return += float(reward)
        replay.add(action, float(reward), terminated, obs[-1])
        if terminated or truncated:
            logger.episode(counters.step, episode_return)
            last_return = episode_return
            episode_return = 0.0
            counters.episode += 1
            counters.actions = []
            obs, _ = env.reset(seed=common.derive_seed(args.seed, "training", counters.episode))
            replay.begin_episode(obs[-1])

    progress.bar.close()
    stop.close()
    logger.close()
    env.close()
    common.print_end(args, run_dir, stop)
    return 128 + stop.signal if stop.signal else 0


if __name__ == "__main__":
    common.exit_with(lambda: main(common.parse_args(Args, fill_presets)))
