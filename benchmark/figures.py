"""Draw the paper's figures from saved agents: how states evolve (Figure 1), what is masked, and how
similar queries and keys are.

    # a minute
    python benchmark/figures.py runs/reacher-easy__mooss__s1/checkpoint.pt --out figures
    # two agents side by side
    python benchmark/figures.py runs/reacher-easy__{base,mooss}__s1/checkpoint.pt --out figures

Masking and similarity are those of the last agent named.
"""

import dataclasses
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from scipy.stats import spearmanr
from sklearn.manifold import TSNE

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import mooss_common as common
import rainbow_mooss_atari as atari
import sac_mooss_dmc as dmc

LENGTH = 20  # observations in Figure 1


@dataclasses.dataclass
class FigureArgs:
    """Draw the paper's figures from saved agents."""

    # saved agents of one run or more, all on one task
    checkpoints: tyro.conf.Positional[tuple[str, ...]]
    out: str = "figures"  # where the pictures go
    sequences: int = 32  # random-action sequences behind the numbers
    seed: int = 0  # of sequences, masks and t-SNE


def load(path):
    """The script that saved an agent, and the agent."""
    for module in (dmc, atari):
        try:
            agent, _ = module.load_agent(path)
            return module, agent
        except common.UsageError as error:
            if "use that script" not in str(error):
                raise
    raise common.UsageError(f"{path} belongs to neither script")


# ------------------------------------------------------------------------------- sequences, states
@dataclasses.dataclass
class Sequence:
    """LENGTH steps of a random policy."""

    obs: np.ndarray  # (T, frame_stack, C, H, W)
    actions: np.ndarray  # (T,) or (T, A)
    rewards: np.ndarray  # (T,)


def collect(module, agent, count, seed):
    """Sequences of a random policy on the agent's task."""
    rng = np.random.default_rng(seed)
    env = module.make_env(agent.args, agent.device)
    sequences = []
    for number in range(count):
        observations = []
        actions = []
        rewards = []
        obs, _ = env.reset(seed=common.derive_seed(seed, "figures", number))
        for _ in range(10 + LENGTH):  # the first ten steps lead away from the initial state
            if module is atari:
                action = int(rng.integers(agent.num_actions))
            else:
                action = rng.uniform(-1, 1, agent.action_dim).astype(np.float32)
            observations.append(obs)
            actions.append(action)
            obs, reward, terminated, truncated, _ = env.step(action)
            rewards.append(float(reward))
            if terminated or truncated:
                obs, _ = env.reset(seed=common.derive_seed(seed, "figures again", number))
        columns = (observations, actions, rewards)
        sequences.append(Sequence(*[np.array(column[-LENGTH:]) for column in columns]))
    env.close()
    return sequences


def centre_pixels(agent, obs):
    """The part of stacks in bytes that an agent sees when it acts: (T, frame_stack * C, H, W)."""
    size = agent.args.image_size
    margin = (obs.shape[-1] - size) // 2
    pixels = torch.as_tensor(obs).flatten(1, 2)
    return pixels[..., margin:margin + size, margin:margin + size]


def prepare(agent, obs):
    """What the encoder sees of stacks in bytes when the agent acts: (T, frame_stack * C, H, W)."""
    pixel_scale = getattr(agent.args, "pixel_scale", 255.0)
    return centre_pixels(agent, obs).to(agent.device).float() / pixel_scale


@torch.no_grad()
def embed(module, agent, obs):
    """What the heads of the RL agent see: states on DMC, features on Atari."""
    encode = agent.online.features if module is atari else agent.critic.encoder
    return encode(prepare(agent, obs)).cpu().numpy()


def same_input(one, other):
    """Whether two agents look at the same task in the same way."""
    names = ("env_id", "image_size", "render_size", "frame_stack", "action_repeat")
    return all(getattr(one.args, name, None) == getattr(other.args, name, None) for name in names)


# ---------------------------------------------------------------------------------------- Figure 1
def rank_correlation(embeddings):
    """Spearman's correlation of temporal distance and distance of states, mean over sequences."""
    earlier, later = np.triu_indices(LENGTH, 1)
    correlations = []
    for states in embeddings:
        distances = np.linalg.norm(states[:, None] - states, axis=2)[earlier, later]
        correlations.append(spearmanr(later - earlier, distances).statistic)
    return float(np.nanmean(correlations))


def figure_states(module, agents, sequences, seed, out):
    """t-SNE of one sequence's states, numbered and coloured by time; the numbers average all."""
    size = (4.5 * len(agents), 4.8)
    figure, panels = plt.subplots(1, len(agents), figsize=size, squeeze=False)
    for (name, agent), axes in zip(agents, panels[0]):
        embeddings = [embed(module, agent, sequence.obs) for sequence in sequences]
        rho = rank_correlation(embeddings)
        print(f"{name}: rank correlation of temporal and state distance {rho:.3f}")
        tsne = TSNE(2, perplexity=5, init="pca", random_state=seed)
        points = tsne.fit_transform(embeddings[0])
        axes.plot(*points.T, color="0.8", linewidth=1, zorder=1)
        axes.scatter(*points.T, c=np.arange(LENGTH), cmap="viridis", s=260, zorder=2)
        for time, (x, y) in enumerate(points):
            colour = "white" if time < 14 else "black"
            axes.text(x, y, str(time), ha="center", va="center", fontsize=9, color=colour)
        axes.set(xticks=[], yticks=[])
        axes.set_title(f"{name}: rank correlation {rho:.2f}", fontsize=12)
    figure.suptitle(
        f"{agent.args.env_id}: states of {LENGTH} random steps\n"
        f"rank correlation of temporal and state distance over {len(sequences)} sequences",
        fontsize=12)
    save(figure, out / "states.png")


# ----------------------------------------------------------------------------------------- masking
def figure_masks(module, agent, sequence, seed, out):
    """Frames, the nodes that a walk and uniform masking choose, and the masked frames.

    One column is one time slice of cubes.
    """
    args = agent.args
    side = args.image_size // args.cube_size
    grid = (args.seq_len // args.cube_len, side, side)
    ratio = args.mask_ratio or 0.5
    generator = torch.Generator().manual_seed(seed)
    walk = module.random_walk_masks(
        1, grid, ratio, generator, args.walk_connectivity, args.walk_root)
    cube = module.uniform_cube_masks(1, grid, ratio, generator)
    masks = [("walk", walk[0].numpy()), ("cube", cube[0].numpy())]
    channels = agent.obs_shape[1]
    frames = centre_pixels(agent, sequence.obs)[:, -channels:]  # the newest of each stack
    frames = frames.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()  # (T, H, W, 3)

    size = (1.7 * grid[0] + 1, 8.6)
    figure, table = plt.subplots(5, grid[0], figsize=size, squeeze=False)
    labels = ["frames"]
    for time in range(grid[0]):
        first = time * args.cube_len
        table[0, time].imshow(frames[first])
        table[0, time].set_title(f"steps {first}-{first + args.cube_len - 1}", fontsize=11)
    for number, (name, mask) in enumerate(masks):
        labels += [f"{name}: nodes", f"{name}: masked"]
        rows = table[1 + 2 * number:3 + 2 * number]
        for time in range(grid[0]):
            frame = frames[time * args.cube_len]
            pixels = mask[time].repeat(args.cube_size, 0).repeat(args.cube_size, 1)
            rows[0, time].imshow(mask[time], cmap="Blues", vmin=0, vmax=1.6)
            rows[1, time].imshow(np.where(pixels[..., None], 0, frame))
    for axes, label in zip(table[:, 0], labels):
        axes.set_ylabel(label, fontsize=11)
    for axes in table.flat:
        axes.set(xticks=[], yticks=[])
    cubes = f"{args.cube_len}x{args.cube_size}x{args.cube_size}"
    figure.suptitle(f"{ratio:.0%} of {np.prod(grid)} cubes of {cubes}")
    figure.tight_layout()
    save(figure, out / "masks.png")


# -------------------------------------------------------------------------------------- similarity
@torch.no_grad()
def query_key_similarity(module, agent, sequences):
    """Similarity (B*F, B*F) of masked queries and keys, as the loss of a MOOSS step ranks it."""
    length = agent.args.seq_len
    count = len(sequences)
    obs = torch.cat([prepare(agent, sequence.obs[:length]) for sequence in sequences])
    actions = torch.as_tensor(np.stack([sequence.actions[:length] for sequence in sequences]))
    rewards = np.stack([sequence.rewards[:length] for sequence in sequences])
    rewards = torch.as_tensor(rewards, dtype=torch.float32)[..., None]  # (B, F, 1)
    masks = module.MaskBank(agent.args, count, agent.device)(0)
    keys = agent.encode_keys(obs)
    if module is atari:
        one_hot = F.one_hot(actions, agent.num_actions).float()
        valid = torch.ones(count, length, dtype=torch.bool)
        weights = torch.ones(count)
        _, similarity = agent.mooss_loss(obs * ~masks, keys, one_hot, rewards, valid, weights)
        return similarity
    _, outputs = agent.mooss_loss(obs * ~masks, keys, actions, rewards)
    return outputs["similarity"]


def by_distance(similarity, length):
    """Similarity (B*F, B*F) within each sequence (B, F, F), its mean and spread over sequences for
    each temporal distance (F,), and the mean between sequences."""
    count = len(similarity) // length
    blocks = similarity.view(count, length, count, length)
    within = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # (B, F, F)
    means = []
    spreads = []
    for distance in range(length):
        later = within.diagonal(distance, 1, 2)
        earlier = within.diagonal(-distance, 1, 2)
        of_sequences = torch.cat([later, earlier], dim=1).mean(1)  # (B,)
        means.append(of_sequences.mean().item())
        spreads.append(of_sequences.std().item())
    between = (similarity.sum() - within.sum()) / (similarity.numel() - within.numel())
    return within, np.array(means), np.array(spreads), between.item()


def figure_similarity(module, agent, sequences, out):
    """Learned similarity by temporal distance, and as a matrix of query time and key time.

    Returns the rank accuracy on these sequences.
    """
    length = agent.args.seq_len
    window = agent.args.temporal_window
    common.require(
        length <= LENGTH, f"the similarity figure needs --seq-len of at most {LENGTH}")
    similarity = query_key_similarity(module, agent, sequences)
    within, mean, spread, between = by_distance(similarity, length)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8))
    left.plot(mean, marker="o", color="tab:orange", label="keys of the same sequence")
    left.fill_between(
        range(length), mean - spread, mean + spread, alpha=0.2, color="tab:orange")
    left.axhline(between, color="0.5", linestyle="--", label="keys of other sequences")
    left.axvline(window, color="0.8", linewidth=1)
    left.annotate(f"L = {window}", (window, 0.02), xycoords=("data", "axes fraction"))
    left.set(
        xlabel="temporal distance (agent steps)", ylabel="similarity q W k",
        title="mean ± spread over sequences")
    left.legend()
    picture = right.imshow(within.mean(0).numpy(), cmap="viridis")
    right.set(xlabel="key time", ylabel="query time", title="mean over sequences")
    figure.colorbar(picture, ax=right)
    figure.tight_layout()
    save(figure, out / "similarity.png")
    return module.rank_accuracy(similarity, length, window).item()


def save(figure, path):
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


# -------------------------------------------------------------------------------------------- main
def main(argv=None):
    args = tyro.cli(FigureArgs, args=argv)
    common.require(args.checkpoints, "name at least one checkpoint.pt")
    common.require(args.sequences >= 2, "--sequences must be at least 2")
    loaded = [load(path) for path in args.checkpoints]
    module, agent = loaded[-1]
    for path, (_, other) in zip(args.checkpoints, loaded):
        common.require(
            same_input(other, agent),
            f"{path} has another task or image size than {args.checkpoints[-1]}")
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(args.seed)
    sequences = collect(module, agent, args.sequences, args.seed)
    agents = [("untrained", module.Agent(agent.args, *agent.shape, agent.device))]
    agents += [(other.args.exp_name, other) for _, other in loaded]
    figure_states(module, agents, sequences, args.seed, out)
    figure_masks(module, agent, sequences[0], args.seed, out)
    if agent.args.aux_weight == 0:
        print("no similarity figure: a Base agent has neither decoder nor W")
    else:
        accuracy = figure_similarity(module, agent, sequences, out)
        if agent.args.temporal_window > 0:
            print(f"rank accuracy on these sequences: {accuracy:.3f} (chance 0.5)")
        else:
            print("no rank accuracy: with --temporal-window 0 there is nothing to rank")
    print(f"wrote to {out}: {', '.join(sorted(path.name for path in out.glob('*.png')))}")
    return 0


if __name__ == "__main__":
    common.exit_with(main)
