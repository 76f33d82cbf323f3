"""The sequence replay against a brute-force list of episodes, and the augmentation it feeds."""

import numpy as np
import pytest
import torch

import mooss_common as common
from conftest import filled_replay, tiny_args
from sac_mooss_dmc import SequenceReplay, augment

CPU = torch.device("cpu")


class ListOfEpisodes:
    """The plain idea: keep every episode as a list; forget what the ring has overwritten."""

    def __init__(self, capacity, stack):
        self.capacity, self.stack, self.episodes, self.rows = capacity, stack, [], 0

    def add(self, frame, action=None, reward=0.0, terminated=False):
        if action is None:
            self.episodes.append([])
        self.episodes[-1].append((self.rows, frame, action, reward, terminated))
        self.rows += 1

    def starts(self, length):
        """Every (episode, time) from which `length` steps can be replayed with all frames of the first stack."""
        oldest, found = self.rows - self.capacity, []
        for episode in self.episodes:
            for t in range(len(episode) - length):
                if episode[max(0, t - self.stack + 1)][0] >= oldest:
                    found.append((episode, t))
        return found

    def observation(self, episode, t):
        return np.concatenate([episode[max(0, t - k)][1] for k in range(self.stack - 1, -1, -1)])


def fill(seed, capacity, steps, stack=3):
    """Random episodes of random length into both; frames are unique, so that a wrong one cannot hide."""
    rng = np.random.default_rng(seed)
    replay = SequenceReplay(capacity, (3, 6, 6), 2, stack, 0, CPU)
    plain, left = ListOfEpisodes(capacity, stack), 0
    for _ in range(steps):
        frame = rng.integers(0, 256, (3, 6, 6), dtype=np.uint8)
        if left == 0:
            row, left = (frame,), int(rng.integers(1, 12))
        else:
            left -= 1
            terminated = bool(left == 0 and rng.random() < 0.5)
            row = (frame, rng.uniform(-1, 1, 2).astype(np.float32), float(rng.normal()), terminated)
        replay.add(*row)
        plain.add(*row)
    return replay, plain


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("capacity,steps", [(200, 90), (40, 40), (40, 41), (40, 333), (25, 260)])
def test_replay_equals_a_list_of_episodes(seed, capacity, steps):
    replay, plain = fill(seed, capacity, steps)
    for length in (1, 4):
        expected = {episode[t][0]: (episode, t) for episode, t in plain.starts(length)}
        assert set(replay.sample_rows(4000, length).tolist()) == set(expected)
        rows = torch.tensor(sorted(expected))[:, None] + torch.arange(length)
        zero = torch.zeros_like(rows)
        obs, next_obs = (replay.observations(r, zero, zero, 6).numpy() for r in (rows, rows + 1))
        actions, rewards, terminated = replay.outcomes(rows)
        for i, (episode, t) in enumerate(expected[row] for row in sorted(expected)):
            for j in range(length):
                assert (obs[i, j] == plain.observation(episode, t + j)).all()
                assert (next_obs[i, j] == plain.observation(episode, t + j + 1)).all()
                _, _, action, reward, ended = episode[t + j + 1]
                assert (actions[i, j].numpy() == action).all() and terminated[i, j] == ended
                assert rewards[i, j] == np.float32(reward)


def test_sampling_is_uniform_over_valid_starts_and_always_full():
    replay, plain = fill(0, 40, 150)
    for length in (1, 4):
        expected = sorted(episode[t][0] for episode, t in plain.starts(length))
        draws = replay.sample_rows(20_000, length).numpy()
        rows, counts = np.unique(draws, return_counts=True)
        assert len(draws) == 20_000 and list(rows) == expected
        chi_square = ((counts - 20_000 / len(rows)) ** 2 / (20_000 / len(rows))).sum()
        assert chi_square < len(rows) + 5 * (2 * len(rows)) ** 0.5


def test_a_batch_is_full_even_with_one_transition():
    replay = SequenceReplay(20, (3, 6, 6), 2, 3, 0, CPU)
    replay.add(np.zeros((3, 6, 6), np.uint8))
    replay.add(np.ones((3, 6, 6), np.uint8), np.zeros(2, np.float32), 1.0, False)
    assert replay.sample_rows(32).tolist() == [0] * 32


def test_frames_are_stored_once_as_bytes():
    """100k agent steps of 3x100x100 take at most 3.1 GB."""
    replay = SequenceReplay(100_000, (3, 100, 100), 6, 3, 0, torch.device("meta"))
    assert replay.frames.dtype == torch.uint8
    assert 3.0e9 <= common.replay_bytes(replay) <= 3.1e9


def test_rows_are_refused_when_no_episode_is_long_enough():
    replay, _ = fill(0, 40, 30)
    with pytest.raises(common.UsageError, match="no episode holds 20 steps"):
        replay.sample_rows(2, 20)


def test_random_crops_are_windows_of_the_stack_and_differ():
    args = tiny_args(pixel_scale=1.0)
    replay = filled_replay(args)
    rows = replay.sample_rows(16)
    obs = augment(replay, rows, args, CPU, intensity=False)
    assert obs.shape == (16, 9, 21, 21) and obs.is_contiguous(memory_format=torch.channels_last)
    zero = torch.zeros_like(rows)
    whole = replay.observations(rows, zero, zero, 24).float()
    offsets = set()
    for image, crop in zip(whole, obs):
        found = [(y, x) for y in range(4) for x in range(4) if torch.equal(image[:, y:y + 21, x:x + 21], crop)]
        assert found
        offsets.add(found[0])
    assert len(offsets) > 3


def test_crop_is_drawn_per_observation_unless_asked_per_sequence():
    """D10: with a replay of one still frame, a sequence's crops differ exactly if drawn per observation."""
    args = tiny_args()
    replay = SequenceReplay(50, (3, 24, 24), 1, 3, 0, CPU)
    still = np.random.default_rng(0).integers(0, 256, (3, 24, 24), dtype=np.uint8)
    replay.add(still)
    for _ in range(20):
        replay.add(still, np.zeros(1, np.float32), 0.0, False)
    rows = torch.arange(4)[:, None] + torch.arange(8)
    for per_sequence in (False, True):
        obs = augment(replay, rows, args, CPU, intensity=False, crop_per_sequence=per_sequence).view(4, 8, 9, 21, 21)
        assert (obs == obs[:, :1]).all() == per_sequence
        assert not (obs == obs[:1]).all()


def test_intensity_scales_whole_observations_by_at_most_ten_percent():
    args = tiny_args(augmentations=("intensity",))
    replay = filled_replay(args)
    rows = replay.sample_rows(200)
    plain = augment(replay, rows, args, CPU, intensity=False)
    ratio = (augment(replay, rows, args, CPU, intensity=True) / plain).flatten(1)
    assert torch.allclose(ratio, ratio[:, :1].expand_as(ratio), atol=1e-5)
    factors = ratio[:, 0]
    assert factors.min() >= 0.8999 and factors.max() <= 1.1001 and 0.03 < factors.std() < 0.06


def test_without_crop_the_centre_is_taken():
    args = tiny_args(augmentations=(), render_size=25, pixel_scale=255.0)
    replay = filled_replay(args)
    rows = replay.sample_rows(4)
    two = torch.full_like(rows, 2)
    expected = replay.observations(rows, two, two, 21).float() / 255
    assert torch.allclose(augment(replay, rows, args, CPU, intensity=True), expected)
