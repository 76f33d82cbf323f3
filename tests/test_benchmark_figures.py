"""The figures of saved agents: the numbers in them are right, and every kind of agent has them."""

import re
import sys

import numpy as np
import pytest
import torch

import mooss_common as common
import rainbow_mooss_atari as atari
import sac_mooss_dmc as dmc
from conftest import ROOT
from helpers import tiny

sys.path.insert(0, str(ROOT / "benchmark"))
import figures


def saved_agent(module, tmp_path, **changes):
    """The checkpoint of a run of a second."""
    flags = tiny.DMC_FLAGS if module is dmc else tiny.ATARI_FLAGS
    flags = {**flags, "run_root": str(tmp_path), "total_timesteps": 60, **changes}
    assert module.main(module.Args(**flags)) == 0
    folder = f"{flags['env_id']}__{flags.get('exp_name', 'mooss')}__s1"
    return tmp_path / folder / "checkpoint.pt"


def draw(tmp_path, *paths):
    words = [*map(str, paths), "--out", str(tmp_path / "out"), "--sequences", "3"]
    assert figures.main(words) == 0


def test_rank_correlation_is_one_for_a_line_and_zero_for_noise():
    line = np.arange(figures.LENGTH)[:, None] * np.ones((1, 5))
    noise = np.random.default_rng(0).normal(size=(200, figures.LENGTH, 5))
    assert figures.rank_correlation([line, -line]) == pytest.approx(1.0)
    assert abs(figures.rank_correlation(noise)) < 0.02


def test_similarity_by_distance_reads_the_right_entries():
    """Query (b, i) and key (c, j): 10 - |i - j| + b where b = c, one more for j later than i; -3
    elsewhere."""
    length = 4
    count = 3
    similarity = torch.full((count * length, count * length), -3.0)
    for b in range(count):
        for i in range(length):
            for j in range(length):
                value = 10 - abs(i - j) + b + (j > i)
                similarity[b * length + i, b * length + j] = value
    within, mean, spread, between = figures.by_distance(similarity, length)
    assert within[1].tolist() == [
        [11, 11, 10, 9], [10, 11, 11, 10], [9, 10, 11, 11], [8, 9, 10, 11]]
    assert mean.tolist() == [11, 10.5, 9.5, 8.5]
    assert spread.tolist() == [1, 1, 1, 1]
    assert between == -3


def test_masks_of_the_figure_are_the_agents_own(tmp_path, monkeypatch):
    """The walk has the agent's root and connectivity."""
    agent = tiny.dmc_agent(tiny.dmc_args(walk_root="fixed", walk_connectivity=6))
    random_walk_masks = dmc.random_walk_masks
    seen = []

    def recorded(*args):
        masks = random_walk_masks(*args)
        seen.append(masks[0])
        return masks

    monkeypatch.setattr(dmc, "random_walk_masks", recorded)
    monkeypatch.setattr(figures, "save", lambda figure, path: figures.plt.close(figure))
    obs = np.zeros((figures.LENGTH, 3, 3, 24, 24), np.uint8)
    for seed in range(5):
        figures.figure_masks(dmc, agent, figures.Sequence(obs, None, None), seed, tmp_path)
    nodes = [mask.flatten().nonzero().flatten().tolist() for mask in seen]
    root = seen[0].numel() // 2
    side = seen[0].shape[1]
    assert all(root in visited for visited in nodes)
    assert len({tuple(visited) for visited in nodes}) > 1
    # With 6 neighbours every visited node has a visited one beside it in one coordinate.
    steps = {1, side, side * side}
    for visited in nodes:
        for a in visited:
            assert any(abs(a - b) in steps for b in visited)


@pytest.mark.parametrize("module", [dmc, atari])
def test_similarity_is_that_of_a_mooss_step(module, dot_env, dot_game):
    """Computed by hand for an untrained agent without masks, Transformer and normalisation."""
    changes = dict(mask_ratio=0.0, decoder_inputs="none", normalize_embeddings=False)
    if module is dmc:
        agent = tiny.dmc_agent(tiny.dmc_args(**changes))
    else:
        agent = tiny.atari_agent(tiny.atari_args(**changes))
    sequences = figures.collect(module, agent, 2, seed=0)
    similarity = figures.query_key_similarity(module, agent, sequences)
    length = agent.args.seq_len
    obs = torch.cat([figures.prepare(agent, sequence.obs[:length]) for sequence in sequences])
    with torch.no_grad():
        states = agent.encode_keys(obs)  # an untrained key encoder is the encoder itself
        expected = agent.decoder.head(states) @ agent.bilinear @ states.T
    torch.testing.assert_close(similarity, expected)


@pytest.mark.parametrize("module, changes", [(dmc, {}), (dmc, {"aux_weight": 0.0}), (atari, {})])
def test_figures_of_a_checkpoint(module, changes, tmp_path, capsys, dot_env, dot_game):
    draw(tmp_path, saved_agent(module, tmp_path, **changes))
    expected = {"states.png", "masks.png"}
    if not changes:
        expected.add("similarity.png")
    pictures = list((tmp_path / "out").iterdir())
    assert {path.name for path in pictures} == expected
    assert all(path.stat().st_size > 5000 for path in pictures)
    said = capsys.readouterr().out
    for name in ("untrained", "mooss"):
        line = rf"^{name}: rank correlation of temporal and state distance -?[01]\.\d+$"
        assert re.search(line, said, re.M)
    assert ("rank accuracy on these sequences" in said) == (not changes)


def test_figures_of_two_agents_stand_side_by_side(tmp_path, capsys, dot_env):
    base = saved_agent(dmc, tmp_path, exp_name="base", aux_weight=0.0)
    mooss = saved_agent(dmc, tmp_path, exp_name="mooss")
    large = saved_agent(dmc, tmp_path, exp_name="large", render_size=28)
    draw(tmp_path, base, mooss)
    said = capsys.readouterr().out
    values = re.findall(r"^(\w+): rank correlation of .* distance (.*)$", said, re.M)
    assert [name for name, _ in values] == ["untrained", "base", "mooss"]
    assert len({value for _, value in values}) == 3
    with pytest.raises(common.UsageError, match="another task or image size"):
        draw(tmp_path, base, mooss, large)
    with pytest.raises(common.UsageError, match="at least one"):
        draw(tmp_path)


@pytest.mark.parametrize("module", [dmc, atari])
def test_an_agent_file_has_the_figures_of_its_checkpoint(module, tmp_path, capsys, dot_env,
                                                         dot_game, monkeypatch):
    monkeypatch.setattr(figures, "save", lambda figure, path: figures.plt.close(figure))
    checkpoint = saved_agent(module, tmp_path)
    capsys.readouterr()
    draw(tmp_path, checkpoint)
    of_checkpoint = capsys.readouterr().out
    draw(tmp_path, checkpoint.with_name(common.AGENT_FILE))
    assert capsys.readouterr().out == of_checkpoint
    assert "rank accuracy" in of_checkpoint
