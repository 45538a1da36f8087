"""Images built and run by buildah, without a Docker engine: the base image is a debootstrap of Debian.

Debian: `apt install buildah debootstrap`, as root. Everything lies in one folder and is gone with it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# The release whose Python is the one that runs this test: pip finds the same wheels in both.
RELEASES = {(3, 11): "bookworm", (3, 13): "trixie"}
BASE = "localhost/debian"
# Where a build sees the files of this machine that pip's configuration names.
_HOST = "/run/host"


class Images:
    """An image store in `folder`, and what is done in it."""

    def __init__(self, folder: Path) -> None:
        """Skips the test where a tool, the right to use it or a fitting Debian release is missing."""
        for tool in ("buildah", "debootstrap"):
            if shutil.which(tool) is None:
                pytest.skip(f"{tool} is not installed")
        if os.geteuid() != 0:
            pytest.skip("debootstrap and buildah need root here")
        if sys.version_info[:2] not in RELEASES:
            pytest.skip("no Debian release has this version of Python")
        self._folder = folder

    def make_base(self) -> None:
        """A minimal Debian that has this machine's configuration of pip."""
        release = RELEASES[sys.version_info[:2]]
        rootfs = self._folder / "rootfs"
        _run("debootstrap", "--variant=minbase", release, str(rootfs))
        (rootfs / "etc" / "pip.conf").write_text(_pip_config())
        container = self.buildah("from", "scratch")
        self.buildah("add", "--quiet", container, str(rootfs), "/")
        self.buildah("commit", "--quiet", "--rm", container, BASE)
        shutil.rmtree(rootfs)

    def build(self, dockerfile: str, tag: str, *options: str) -> None:
        """The image that `docker build --file docker/DOCKERFILE OPTIONS .` would make."""
        volumes = [f"--volume={path}:{_HOST}{path}:ro" for path in _pip_paths()]
        # OCI's own format knows no health checks.
        arguments = [
            "--format=docker",
            f"--build-arg=BASE={BASE}",
            "--isolation=chroot",
            f"--file={ROOT}/docker/{dockerfile}",
        ]
        self.buildah("build", *arguments, *volumes, *options, f"--tag={tag}", str(ROOT))

    def config(self, tag: str) -> dict[str, Any]:
        """The image's configuration as Docker shows it."""
        config: dict[str, Any] = json.loads(self.buildah("inspect", "--type=image", tag))["Docker"]["config"]
        return config

    def num_bytes(self, tag: str) -> int:
        """What the files of an image take, unpacked."""
        container = self.buildah("from", tag)
        folder = self.buildah("mount", container)
        size = int(_run("du", "--summarize", "--bytes", "--one-file-system", folder).split()[0])
        self.buildah("rm", container)
        return size

    @contextmanager
    def container(self, tag: str) -> Iterator[str]:
        """The name of a container of an image."""
        name = self.buildah("from", tag)
        try:
            yield name
        finally:
            self.buildah("rm", name)

    def command(self, container: str, *command: str, mounts: tuple[str, ...] = ()) -> list[str]:
        """What runs a command in a container, with this machine's network, as the image's user."""
        volumes = [f"--volume={mount}" for mount in mounts]
        return [*self._buildah, "run", "--isolation=chroot", *volumes, container, "--", *command]

    @property
    def _buildah(self) -> list[str]:
        return ["buildah", f"--root={self._folder}/store", f"--runroot={self._folder}/run", "--storage-driver=vfs"]

    def buildah(self, *arguments: str) -> str:
        """One command of buildah; what it wrote."""
        return _run(*self._buildah, *arguments).strip()


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (command, done.stdout[-3000:], done.stderr[-3000:])
    return done.stdout


def _pip_settings() -> dict[str, str]:
    """pip's global settings, those of the environment first."""
    listed = _run(sys.executable, "-m", "pip", "config", "list")
    lines = re.findall(r"^(?:global|:env:)\.+([a-z-]+)='(.*)'$", listed, re.MULTILINE)
    return dict(reversed(lines))


def _pip_config() -> str:
    lines = [f"{name} = {value}" for name, value in _pip_settings().items()]
    text = "\n".join(["[global]", *lines]) + "\n"
    for path in _pip_paths():
        text = re.sub(rf"(?<= ){path}(?=[/\s])|(?<=file://){path}(?=[/\s])", _HOST + path, text)
    return text


def _pip_paths() -> list[str]:
    """Files and folders of this machine that pip's configuration names; of an index all, for its pages lead elsewhere
    in it."""
    values = " ".join(_pip_settings().values()).split()
    indexes = {str(Path(value.removeprefix("file://")).parent) for value in values if value.startswith("file://")}
    return [path for path in (*values, *indexes) if path.startswith("/") and Path(path).exists()]
