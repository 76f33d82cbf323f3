"""The DMC replay against a brute-force list of episodes, and the augmentation of what it gives."""

import numpy as np
import pytest
import torch

import mooss_common as common
import sac_mooss_dmc as dmc
from helpers.tiny import dmc_agent, dmc_args, dmc_replay

CPU = torch.device("cpu")
FRAME_SHAPE = (3, 6, 6)


class ListOfEpisodes:
    """The plain idea: keep every episode as two lists, and know what the ring has overwritten."""

    def __init__(self, capacity, stack):
        self.capacity = capacity
        self.stack = stack
        self.episodes = []
        self.rows = 0

    def begin_episode(self, frame):
        self.episodes.append({"frames": [], "rows": [], "steps": []})
        self._append(frame)

    def add(self, action, reward, terminated, next_frame):
        self.episodes[-1]["steps"].append((action, reward, terminated))
        self._append(next_frame)

    def _append(self, frame):
        self.episodes[-1]["frames"].append(frame)
        self.episodes[-1]["rows"].append(self.rows)
        self.rows += 1

    def starts(self, length):
        """Row -> (episode, time): `length` steps follow it, and its whole stack is there still."""
        oldest = self.rows - self.capacity
        found = {}
        for episode in self.episodes:
            for t in range(len(episode["steps"]) - length + 1):
                if episode["rows"][max(0, t - self.stack + 1)] >= oldest:
                    found[episode["rows"][t]] = (episode, t)
        return found

    def observation(self, episode, t):
        times = [max(0, t - age) for age in reversed(range(self.stack))]
        return np.concatenate([episode["frames"][time] for time in times])


def random_episodes(seed, rows):
    """The calls that fill a replay with that many rows: (name of a method, its arguments).

    Frames are unique, so that a wrong one cannot hide; episodes are short, often terminated.
    """
    rng = np.random.default_rng(seed)
    left = 0
    for _ in range(rows):
        frame = rng.integers(0, 256, FRAME_SHAPE, dtype=np.uint8)
        if left == 0:
            left = int(rng.integers(1, 12))
            yield "begin_episode", (frame,)
            continue
        left -= 1
        action = rng.uniform(-1, 1, 2).astype(np.float32)
        terminated = bool(left == 0 and rng.random() < 0.5)
        yield "add", (action, float(rng.normal()), terminated, frame)


def fill(seed, capacity, rows, stack=3):
    replay = dmc.SequenceReplay(capacity, FRAME_SHAPE, 2, stack, CPU)
    plain = ListOfEpisodes(capacity, stack)
    for name, arguments in random_episodes(seed, rows):
        getattr(replay, name)(*arguments)
        getattr(plain, name)(*arguments)
    return replay, plain


def still_replay(size=24, steps=20):
    """A replay in which all frames are the same, so that only augmentation tells them apart."""
    replay = dmc.SequenceReplay(50, (3, size, size), 1, 3, CPU)
    frame = np.random.default_rng(0).integers(1, 256, (3, size, size), dtype=np.uint8)
    replay.begin_episode(frame)
    for _ in range(steps):
        replay.add(np.zeros(1, np.float32), 0.0, False, frame)
    return replay


# ------------------------------------------------------------------------------------------ replay
def test_a_row_is_a_frame_its_action_its_reward_and_whether_that_ended_the_episode():
    frames = [np.full(FRAME_SHAPE, value, np.uint8) for value in (10, 20, 30, 40, 50)]
    replay = dmc.SequenceReplay(20, FRAME_SHAPE, 1, 1, CPU)
    replay.begin_episode(frames[0])
    replay.add(np.array([0.1], np.float32), 1.0, False, frames[1])
    replay.add(np.array([0.2], np.float32), 2.0, True, frames[2])  # closed by its last frame
    replay.begin_episode(frames[3])
    replay.add(np.array([0.3], np.float32), 3.0, False, frames[4])

    rows = torch.arange(5)
    actions, rewards, terminated = replay.steps(rows)
    assert replay.observations(rows)[:, 0, 0, 0].tolist() == [10, 20, 30, 40, 50]
    # The last frame of an episode and the newest one have no action (yet).
    assert torch.equal(actions, torch.tensor([[0.1], [0.2], [0.0], [0.3], [0.0]]))
    assert rewards.tolist() == [1.0, 2.0, 0.0, 3.0, 0.0]
    assert terminated.tolist() == [False, True, False, False, False]
    assert set(replay.sample(1000).tolist()) == {0, 1, 3}


def test_a_stack_repeats_the_first_frame_of_its_episode_and_has_the_newest_last():
    replay = dmc.SequenceReplay(20, FRAME_SHAPE, 1, 3, CPU)
    action = np.zeros(1, np.float32)
    for values in ((1, 2, 3, 4), (7, 8)):
        replay.begin_episode(np.full(FRAME_SHAPE, values[0], np.uint8))
        for value in values[1:]:
            replay.add(action, 0.0, False, np.full(FRAME_SHAPE, value, np.uint8))
    stacks = replay.observations(torch.arange(6))
    assert stacks.shape == (6, 9, 6, 6) and stacks.dtype == torch.uint8
    expected = [[1, 1, 1], [1, 1, 2], [1, 2, 3], [2, 3, 4], [7, 7, 7], [7, 7, 8]]
    assert stacks[:, ::3, 0, 0].tolist() == expected


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("capacity,rows", [(200, 90), (40, 40), (40, 41), (40, 333), (25, 260)])
def test_replay_equals_a_list_of_episodes(seed, capacity, rows):
    replay, plain = fill(seed, capacity, rows)
    torch.manual_seed(seed)
    for length in (1, 4):
        expected = plain.starts(length)
        starts = sorted(expected)
        assert sorted(set(replay.sample(4000, length).tolist())) == starts
        sequences = torch.tensor(starts)[:, None] + torch.arange(length)
        obs = replay.observations(sequences).numpy()
        next_obs = replay.observations(sequences + 1).numpy()
        actions, rewards, terminated = replay.steps(sequences)
        for i, start in enumerate(starts):
            episode, t = expected[start]
            for j in range(length):
                action, reward, ended = episode["steps"][t + j]
                assert (obs[i, j] == plain.observation(episode, t + j)).all()
                assert (next_obs[i, j] == plain.observation(episode, t + j + 1)).all()
                assert (actions[i, j].numpy() == action).all()
                assert rewards[i, j] == np.float32(reward)
                assert terminated[i, j] == ended


def test_drawn_sequences_never_cross_an_episode_end_nor_the_write_head():
    """Checked after every step by what the frames say of themselves: their row, their episode."""
    capacity = 30
    length = 5
    rng = np.random.default_rng(0)
    replay = dmc.SequenceReplay(capacity, (3, 1, 1), 1, 3, CPU)
    newest = -1
    left = 0
    checked = 0
    for _ in range(300):
        newest += 1
        if left == 0:
            left = int(rng.integers(5, 14))
            first = newest
            label = np.array([newest // 256, newest % 256, first % 256], np.uint8)
            replay.begin_episode(label.reshape(3, 1, 1))
        else:
            left -= 1
            label = np.array([newest // 256, newest % 256, first % 256], np.uint8)
            replay.add(np.zeros(1, np.float32), 0.0, left == 0, label.reshape(3, 1, 1))
        if newest < 20:
            continue
        rows = replay.sample(40, length)[:, None] + torch.arange(length + 1)
        labels = replay.observations(rows).view(40, length + 1, 3, 3).long()
        stored_rows = labels[..., 0] * 256 + labels[..., 1]  # (sequence, step, age)
        episodes = labels[..., 2].flatten(1)
        _, _, terminated = replay.steps(rows[:, :length - 1])
        assert (episodes == episodes[:, :1]).all()
        assert torch.equal(stored_rows[..., 2], rows)
        assert (stored_rows > newest - capacity).all() and (stored_rows <= newest).all()
        assert not terminated.any()
        checked += 1
    assert checked == 280


def test_sampling_is_uniform_over_valid_starts_and_always_full():
    replay, plain = fill(0, 40, 150)
    torch.manual_seed(0)
    for length in (1, 4):
        draws = replay.sample(20_000, length)
        rows, counts = draws.unique(return_counts=True)
        assert len(draws) == 20_000
        assert rows.tolist() == sorted(plain.starts(length))
        expected = 20_000 / len(rows)
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert chi_square < len(rows) + 5 * (2 * len(rows)) ** 0.5


def test_a_batch_is_full_even_with_one_transition():
    replay = dmc.SequenceReplay(20, FRAME_SHAPE, 2, 3, CPU)
    replay.begin_episode(np.zeros(FRAME_SHAPE, np.uint8))
    replay.add(np.zeros(2, np.float32), 1.0, False, np.ones(FRAME_SHAPE, np.uint8))
    assert replay.sample(32).tolist() == [0] * 32


def test_complete_rows_never_change():
    replay, _ = fill(1, 100, 60)
    rows = torch.arange(59)
    before = [replay.observations(rows), *replay.steps(rows)]
    for name, arguments in random_episodes(2, 40):
        getattr(replay, name)(*arguments)
    after = [replay.observations(rows), *replay.steps(rows)]
    # Row 59 got its action or was closed; those before it are as they were.
    assert all(torch.equal(a, b) for a, b in zip(before, after))


@pytest.mark.parametrize("rows", [17, 30, 77])
def test_a_replay_restored_from_its_complete_rows_and_state_goes_on_alike(rows):
    replay, _ = fill(3, 30, rows)
    restored = dmc.SequenceReplay(30, FRAME_SHAPE, 2, 3, CPU)
    complete = torch.arange(replay.oldest_row, replay.newest_row) % 30
    for name in replay.columns:
        getattr(restored, name)[complete] = getattr(replay, name)[complete]
    restored.load_state_dict(replay.state_dict())
    # The episode that was half played goes on, ends, and another one begins.
    action = np.full(2, 0.5, np.float32)
    for each in (replay, restored):
        for value in (1, 2, 3, 4):
            each.add(action, 1.0, value == 4, np.full(FRAME_SHAPE, value, np.uint8))
        each.begin_episode(np.full(FRAME_SHAPE, 9, np.uint8))
    assert restored.newest_row == replay.newest_row
    for name in replay.columns:
        assert torch.equal(getattr(restored, name), getattr(replay, name)), name


def test_frames_are_stored_once_as_bytes():
    """100k agent steps of 3x100x100 take at most 3.1 GB."""
    shape = (3, 100, 100)
    replay = dmc.SequenceReplay(100_000, shape, 6, 3, torch.device("meta"))
    assert replay.frames.dtype == torch.uint8
    assert 3.0e9 <= common.replay_bytes(replay) <= 3.1e9


def test_rows_are_refused_when_no_episode_is_long_enough():
    replay, _ = fill(0, 40, 30)
    with pytest.raises(common.UsageError, match="no episode holds 20 steps"):
        replay.sample(2, 20)


# ------------------------------------------------------------------------------------ augmentation
def test_a_random_crop_equals_slicing_every_image():
    images = torch.randint(256, (50, 9, 24, 24), dtype=torch.uint8)
    torch.manual_seed(0)
    crops = dmc.random_crop(images, 21)
    torch.manual_seed(0)
    top, left = torch.randint(4, (2, 50))
    plain = [image[:, y:y + 21, x:x + 21] for image, y, x in zip(images, top, left)]
    assert torch.equal(crops, torch.stack(plain))


def test_random_crops_are_windows_of_the_stack_and_differ():
    args = dmc_args(pixel_scale=1.0)
    replay = dmc_replay(args)
    torch.manual_seed(0)
    images = replay.observations(replay.sample(16))
    obs = dmc.augment(images, args, CPU, intensity=False)
    assert obs.shape == (16, 9, 21, 21)
    assert obs.is_contiguous(memory_format=torch.channels_last)
    places = set()
    for image, window in zip(images.float(), obs):
        found = [
            (y, x) for y in range(4) for x in range(4)
            if torch.equal(image[:, y:y + 21, x:x + 21], window)]
        assert found
        places.add(found[0])
    assert len(places) > 3


def test_every_window_that_fits_is_as_likely_as_any_other():
    """D15: pixels that say where they are show how often each of the 4 x 4 windows was taken."""
    torch.manual_seed(0)
    side = torch.arange(24, dtype=torch.uint8)
    where = torch.stack(torch.meshgrid(side, side, indexing="ij"))  # (2, 24, 24)
    windows = dmc.random_crop(where.expand(16_000, 2, 24, 24), 21)
    places = windows[:, 0, 0, 0].long() * 4 + windows[:, 1, 0, 0].long()
    counts = places.bincount(minlength=16)
    assert len(counts) == 16
    chi_square = ((counts - 1000.0) ** 2 / 1000).sum()
    assert chi_square < 45  # of 15 degrees of freedom: above it once in ten thousand


def test_crop_is_drawn_per_observation_unless_asked_per_sequence():
    """D10: on a still picture, crops of a sequence differ exactly if drawn per observation."""
    args = dmc_args()
    torch.manual_seed(0)
    rows = torch.arange(4)[:, None] + torch.arange(8)
    images = still_replay().observations(rows)
    for per_sequence in (False, True):
        obs = dmc.augment(images, args, CPU, intensity=False, crop_per_sequence=per_sequence)
        obs = obs.view(4, 8, 9, 21, 21)
        assert (obs == obs[:, :1]).all() == per_sequence
        assert not (obs == obs[:1]).all()


def test_intensity_scales_whole_observations_by_at_most_ten_percent():
    args = dmc_args(augmentations=("intensity",))
    replay = dmc_replay(args)
    torch.manual_seed(0)
    images = replay.observations(replay.sample(200))
    plain = dmc.augment(images, args, CPU, intensity=False)
    ratio = (dmc.augment(images, args, CPU, intensity=True) / plain).flatten(1)
    assert torch.allclose(ratio, ratio[:, :1].expand_as(ratio), atol=1e-5)
    factors = ratio[:, 0]
    assert factors.min() >= 0.8999 and factors.max() <= 1.1001
    assert 0.03 < factors.std() < 0.06


def test_without_crop_the_centre_is_taken():
    args = dmc_args(augmentations=(), render_size=25, pixel_scale=255.0)
    replay = dmc_replay(args)
    images = replay.observations(replay.sample(4))
    expected = images[..., 2:23, 2:23].float() / 255
    assert torch.allclose(dmc.augment(images, args, CPU, intensity=True), expected)


def inputs_of_an_update(args):
    """What one update on still pictures shows to the critic loss and to the two encoders."""
    agent = dmc_agent(args)
    seen = {}
    critic_loss = agent.critic_loss

    def spy(obs, action, reward, terminated, next_obs, noise):
        seen["obs"] = obs.clone()
        seen["next_obs"] = next_obs.clone()
        return critic_loss(obs, action, reward, terminated, next_obs, noise)

    agent.critic_loss = spy
    networks = {"query": agent.critic.encoder, "key": agent.key_encoder}
    for name, network in networks.items():
        network.register_forward_pre_hook(
            lambda module, inputs, name=name: seen.update({name: inputs[0].clone()}))
    agent.update(still_replay(), 0, log=False)
    return seen


def test_the_views_of_one_observation_are_augmented_independently():
    """The critic's s and s', and the query's and the key's view of a sequence."""
    seen = inputs_of_an_update(dmc_args(mask_ratio=0.0, batch_size=32))
    for one, other in (("obs", "next_obs"), ("query", "key")):
        same = (seen[one] == seen[other]).flatten(1).all(1)
        assert same.float().mean() < 0.5, one


@pytest.mark.parametrize("rl_intensity", [False, True])
def test_intensity_is_for_sequences_and_on_demand_for_the_critic(rl_intensity):
    """D9."""
    changes = dict(augmentations=("intensity",), mask_ratio=0.0, rl_intensity=rl_intensity)
    seen = inputs_of_an_update(dmc_args(**changes))
    varies = {name: bool((obs != obs[:1]).any()) for name, obs in seen.items()}
    assert varies == {
        "obs": rl_intensity, "next_obs": rl_intensity, "query": True, "key": True}
