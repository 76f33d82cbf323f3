"""Which OpenGL backend renders, and on which GPU."""

import os
import subprocess

import pytest
import torch

import mooss_common as common

CPU = torch.device("cpu")


def use_headless_gl(device=CPU):
    """Without what an earlier call remembers."""
    common.use_headless_gl.cache_clear()
    try:
        return common.use_headless_gl(device)
    finally:
        common.use_headless_gl.cache_clear()


class Probe:
    """Stands in for the probing subprocesses: only `working` backends render.

    `egl_numbers` is what EGL knows: the number of a GPU in CUDA's order to that in its own.
    """

    def __init__(self, working):
        self.working = working
        self.egl_numbers = {}
        self.hanging = set()
        self.tried = []

    def __call__(self, command, env, timeout, **options):
        assert 0 < timeout <= 120
        program, *words = command[2:]
        if program == common.EGL_PROBE:
            number = self.egl_numbers.get(int(words[0]), "")
            return subprocess.CompletedProcess(command, 0, stdout=f"{number}\n")
        setting = (env["MUJOCO_GL"], env.get("MUJOCO_EGL_DEVICE_ID"))
        self.tried.append(setting)
        if setting[0] in self.hanging:
            raise subprocess.TimeoutExpired(command, timeout)
        if setting[0] not in self.working:
            raise subprocess.CalledProcessError(1, command)
        return subprocess.CompletedProcess(command, 0, stdout="")


@pytest.fixture
def probe(monkeypatch):
    def install(*working, **environment):
        fake = Probe(working)
        for name in ("MUJOCO_GL", "MUJOCO_EGL_DEVICE_ID", "CUDA_VISIBLE_DEVICES"):
            monkeypatch.setenv(name, "")  # so that monkeypatch restores what the function sets
            monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(common.subprocess, "run", fake)
        return fake

    return install


def test_first_backend_that_renders_is_used(probe):
    fake = probe("osmesa", "glfw")
    assert use_headless_gl() == "osmesa"
    assert os.environ["MUJOCO_GL"] == "osmesa"
    assert [name for name, _ in fake.tried] == ["egl", "osmesa"]


def test_what_the_user_set_wins(probe):
    fake = probe("glfw", "egl", MUJOCO_GL="glfw")
    assert use_headless_gl() == "glfw"
    assert [name for name, _ in fake.tried] == ["glfw"]


def test_what_the_user_set_and_cannot_render_is_named(probe):
    probe("egl", MUJOCO_GL="osmesa")
    with pytest.raises(common.UsageError, match="MUJOCO_GL=osmesa"):
        use_headless_gl()


def test_no_backend_names_the_package(probe):
    probe()
    with pytest.raises(common.UsageError, match="apt-get install libegl1"):
        use_headless_gl()


def test_a_backend_that_hangs_is_passed_over(probe):
    fake = probe("osmesa")
    fake.hanging = {"egl"}
    assert use_headless_gl() == "osmesa"


@pytest.mark.parametrize("visible", ["2,3", "GPU-8d1f,GPU-2c0a"])
def test_rendering_happens_on_the_gpu_that_trains(visible, probe):
    """EGL itself says which of its devices it is, however the GPUs that CUDA sees are named."""
    fake = probe("egl", CUDA_VISIBLE_DEVICES=visible)
    fake.egl_numbers = {0: 2, 1: 0}
    assert use_headless_gl(torch.device("cuda", 1)) == "egl"
    assert os.environ["MUJOCO_EGL_DEVICE_ID"] == "0"


def test_where_egl_does_not_know_cuda_the_choice_of_a_device_stays_open(probe):
    fake = probe("egl")
    use_headless_gl(torch.device("cuda", 1))
    assert fake.tried == [("egl", None)]
    assert "MUJOCO_EGL_DEVICE_ID" not in os.environ


def test_the_users_choice_of_an_egl_device_wins(probe):
    fake = probe("egl", MUJOCO_EGL_DEVICE_ID="0")
    fake.egl_numbers = {1: 3}
    use_headless_gl(torch.device("cuda", 1))
    assert fake.tried == [("egl", "0")]


def test_training_on_the_cpu_leaves_the_choice_of_an_egl_device_open(probe):
    fake = probe("egl")
    use_headless_gl()
    assert fake.tried == [("egl", None)]
    assert "MUJOCO_EGL_DEVICE_ID" not in os.environ
