"""Draw the paper's figures from saved agents: state evolution (Figure 1), masking, learned similarity.

    python benchmark/figures.py runs/reacher-easy__mooss__s1/checkpoint.pt --out figures
    python benchmark/figures.py runs/reacher-easy__{base,mooss}__s1/checkpoint.pt --out figures    # side by side

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
import tyro
from scipy.stats import spearmanr
from sklearn.manifold import TSNE

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import mooss_common as common
import rainbow_mooss_atari
import sac_mooss_dmc

LENGTH = 20  # observations in Figure 1


@dataclasses.dataclass
class FigureArgs:
    """Draw the paper's figures from saved agents."""

    checkpoints: tyro.conf.Positional[tuple[str, ...]]  # checkpoint.pt of one run or more on one task
    out: str = "figures"  # where the pictures go
    sequences: int = 32  # random-action sequences behind the numbers
    seed: int = 0  # of sequences, masks and t-SNE


def load(path):
    """The script that wrote the checkpoint, and its agent."""
    for module in (sac_mooss_dmc, rainbow_mooss_atari):
        try:
            return module, module.load_agent(path)[0]
        except common.UsageError as error:
            if "use that script" not in str(error):
                raise
    raise common.UsageError(f"{path} belongs to neither script")


def collect(module, agent, count, seed):
    """Sequences of LENGTH observations under random actions: a list of (obs (T, S, C, H, W), actions, rewards)."""
    args, rng, sequences = agent.args, np.random.default_rng(seed), []
    env = module.make_env(args, agent.device)
    for number in range(count):
        obs, _ = env.reset(seed=common.derive_seed(seed, "figures", number))
        observations, actions, rewards = [], [], []
        for _ in range(10 + LENGTH):  # the first ten steps lead away from the initial state
            if hasattr(env.action_space, "n"):
                action = int(rng.integers(env.action_space.n))
            else:
                action = rng.uniform(-1, 1, env.action_space.shape).astype(np.float32)
            observations.append(obs)
            actions.append(action)
            obs, reward, terminated, truncated, _ = env.step(action)
            rewards.append(float(reward))
            if terminated or truncated:
                obs, _ = env.reset(seed=common.derive_seed(seed, "figures again", number))
        sequences.append(tuple(np.array(values[-LENGTH:]) for values in (observations, actions, rewards)))
    env.close()
    return sequences


def prepare(agent, obs):
    """Observations (T, S, C, H, W), uint8, as the encoder sees them when acting: (T, S*C, H, W)."""
    margin = (obs.shape[-1] - agent.args.image_size) // 2
    obs = obs[..., margin:margin + agent.args.image_size, margin:margin + agent.args.image_size]
    scale = getattr(agent.args, "pixel_scale", 255.0)
    return torch.as_tensor(np.ascontiguousarray(obs), device=agent.device).flatten(1, 2).float() / scale


def same_input(one, other):
    """Whether two agents look at the same task in the same way."""
    return all(getattr(one.args, name, None) == getattr(other.args, name, None)
               for name in ("env_id", "image_size", "render_size", "frame_stack", "action_repeat"))


@torch.no_grad()
def embed(agent, obs):
    encode = agent.critic.encoder if hasattr(agent, "critic") else agent.online.features
    return encode(prepare(agent, obs)).cpu().numpy()


def rank_correlation(embeddings):
    """Mean over sequences of Spearman's correlation between temporal distance and distance of embeddings."""
    upper = np.triu_indices(LENGTH, 1)
    temporal = (upper[1] - upper[0])
    values = [spearmanr(temporal, np.linalg.norm(e[:, None] - e[None], axis=2)[upper]).statistic for e in embeddings]
    return float(np.nanmean(values))


def figure_states(agents, sequences, seed, out):
    """Figure 1: t-SNE of one sequence's states, numbered and coloured by time; the numbers average all sequences."""
    figure, panels = plt.subplots(1, len(agents), figsize=(4.5 * len(agents), 4.5), squeeze=False)
    for (name, agent), axes in zip(agents, panels[0]):
        embeddings = [embed(agent, obs) for obs, _, _ in sequences]
        rho = rank_correlation(embeddings)
        print(f"{name}: rank correlation of temporal and state distance {rho:.3f}")
        points = TSNE(2, perplexity=5, init="pca", random_state=seed).fit_transform(embeddings[0])
        axes.plot(*points.T, color="#cccccc", linewidth=1, zorder=1)
        axes.scatter(*points.T, c=np.arange(LENGTH), cmap="viridis", s=220, zorder=2)
        for time, (x, y) in enumerate(points):
            axes.text(x, y, str(time), ha="center", va="center", fontsize=8, color="white" if time < 14 else "black")
        axes.set(xticks=[], yticks=[])
        axes.set_title(f"{name}: rank correlation {rho:.2f}", fontsize=10)
    figure.suptitle(f"{agent.args.env_id}: states of {LENGTH} random steps; rank correlation of temporal and state "
                    f"distance over {len(sequences)} sequences", fontsize=10, wrap=True)
    figure.savefig(out / "states.png", dpi=130, bbox_inches="tight")
    plt.close(figure)


def figure_masks(module, agent, sequence, seed, out):
    """Frames, the nodes that a walk and uniform masking choose, and the masked frames, one column a time slice."""
    args, newest = agent.args, agent.frame_channels
    frames = prepare(agent, sequence[0])[:args.seq_len, -newest:] * getattr(args, "pixel_scale", 255.0)
    frames = frames.byte().permute(0, 2, 3, 1).cpu().numpy()
    side = args.image_size // args.cube_size
    grid = (args.seq_len // args.cube_len, side, side)
    ratio = args.mask_ratio or 0.5
    generator = torch.Generator().manual_seed(seed)
    walk = module.random_walk_masks(1, grid, ratio, generator, args.walk_connectivity, args.walk_root)[0]
    masks = {"walk": walk.numpy(),
             "cube": module.uniform_cube_masks(1, grid, ratio, generator)[0].numpy()}
    figure, table = plt.subplots(5, grid[0], figsize=(1.7 * grid[0] + 1, 8.6), squeeze=False)
    for time in range(grid[0]):
        frame = frames[time * args.cube_len]
        frame = np.repeat(frame, 3, axis=2) if frame.shape[2] == 1 else frame
        table[0, time].imshow(frame)
        table[0, time].set_title(f"steps {time * args.cube_len}-{(time + 1) * args.cube_len - 1}", fontsize=8)
        for row, kind in ((1, "walk"), (3, "cube")):
            cells = masks[kind][time]
            pixels = cells.repeat(args.cube_size, 0).repeat(args.cube_size, 1)
            table[row, time].imshow(cells, cmap="Blues", vmin=0, vmax=1.6)
            table[row + 1, time].imshow(np.where(pixels[..., None], 0, frame))
    for row, label in enumerate(("frames", "walk: nodes", "walk: masked", "cube: nodes", "cube: masked")):
        table[row, 0].set_ylabel(label, fontsize=9)
    for axes in table.flat:
        axes.set(xticks=[], yticks=[])
    figure.suptitle(f"{ratio:.0%} of {np.prod(grid)} cubes of {args.cube_len}x{args.cube_size}x{args.cube_size}")
    figure.tight_layout()
    figure.savefig(out / "masks.png", dpi=130, bbox_inches="tight")
    plt.close(figure)


def by_distance(similarity, length):
    """Each sequence's block (B, F, F), mean and spread over sequences for each temporal distance, mean of the rest."""
    count = len(similarity) // length
    blocks = similarity.view(count, length, count, length).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    values = [torch.cat([blocks.diagonal(k, 1, 2), blocks.diagonal(-k, 1, 2)], 1).mean(1) for k in range(length)]
    others = (similarity.sum() - blocks.sum()) / (similarity.numel() - blocks.numel())
    return blocks, *(np.array([getattr(v, name)().item() for v in values]) for name in ("mean", "std")), others.item()


@torch.no_grad()
def figure_similarity(module, agent, sequences, out):
    """Learned query-key similarity by temporal distance, and as a matrix of query and key time."""
    args, length = agent.args, agent.args.seq_len
    common.require(length <= LENGTH, f"the similarity figure needs --seq-len of at most {LENGTH}")
    obs = torch.cat([prepare(agent, sequence[0][:length]) for sequence in sequences])
    rewards = torch.tensor(np.array([sequence[2][:length] for sequence in sequences]), dtype=torch.float32)[..., None]
    masks = module.MaskBank(args, len(sequences), agent.device)(0)
    actions = torch.as_tensor(np.array([sequence[1][:length] for sequence in sequences]))
    if module is rainbow_mooss_atari:
        actions = torch.nn.functional.one_hot(actions, agent.num_actions).float()
        everything = torch.ones(len(sequences), length, dtype=torch.bool), torch.ones(len(sequences))
    else:
        everything = ()
    keys, = agent.key_states(obs)
    batch = (x.to(agent.device) for x in (obs * ~masks, keys, actions, rewards, *everything))
    _, similarity = agent.mooss_loss(*batch)
    blocks, mean, std, others = by_distance(similarity.cpu(), length)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    left.plot(mean, marker="o", color="#1f77b4", label="keys of the same sequence")
    left.fill_between(range(length), mean - std, mean + std, alpha=0.2, color="#1f77b4")
    left.axhline(others, color="#7f7f7f", linestyle="--", label="keys of other sequences")
    left.axvline(args.temporal_window, color="#cccccc", linewidth=1)
    left.set(xlabel="temporal distance (agent steps)", ylabel="similarity q W k", title="mean ± spread over sequences")
    left.legend(fontsize=8)
    picture = right.imshow(blocks.mean(0).numpy(), cmap="viridis")
    right.set(xlabel="key time", ylabel="query time", title="mean over sequences")
    figure.colorbar(picture, ax=right)
    figure.tight_layout()
    figure.savefig(out / "similarity.png", dpi=130, bbox_inches="tight")
    plt.close(figure)
    accuracy = module.rank_accuracy(similarity, length, args.temporal_window)
    return accuracy.item()


def main(argv=None):
    args = tyro.cli(FigureArgs, args=argv)
    common.require(args.checkpoints, "name at least one checkpoint.pt")
    loaded = [load(path) for path in args.checkpoints]
    module, agent = loaded[-1]
    for path, (_, other) in zip(args.checkpoints, loaded):
        common.require(same_input(other, agent), f"{path} has another task or image size than {args.checkpoints[-1]}")
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    sequences = collect(module, agent, args.sequences, args.seed)
    actions = agent.action_dim if module is sac_mooss_dmc else agent.num_actions
    untrained = module.Agent(agent.args, sequences[0][0].shape[1:], actions, agent.device)
    agents = [("untrained", untrained), *((each.args.exp_name, each) for _, each in loaded)]
    figure_states(agents, sequences, args.seed, out)
    figure_masks(module, agent, sequences[0], args.seed, out)
    if agent.args.aux_weight > 0:
        accuracy = figure_similarity(module, agent, sequences, out)
        print(f"rank accuracy on these sequences: {accuracy:.3f} (chance 0.5)" if agent.args.temporal_window > 0 else
              "no rank accuracy: with --temporal-window 0 there is nothing to rank")
    else:
        print("no similarity figure: a Base agent has neither decoder nor W")
    print(f"wrote {out}/states.png, masks.png" + (", similarity.png" if agent.args.aux_weight > 0 else ""))
    return 0


if __name__ == "__main__":
    common.exit_with(main)
