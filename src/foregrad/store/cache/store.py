"""Entries on disk: one file each, named by its key, there as a whole or not at all.

    foregrad cache 1 <SHA-256 of the rest, 64 digits>
    <zlib: JSON {"key": ..., "about": {...}, "content": ...}>

A file is written beside its place and renamed into it, so processes may read and write at once: the last one wins, and
all write equal entries. The checksum, and the key inside, reveal a file torn by a crash, damaged or renamed; it is no
entry. Only a folder and files of the user's own, writable by nobody else, are read. Reading executes nothing. The
file's modification time is the time of last use; past the limit of bytes the oldest go.

An error of the disk is a miss: the cache never fails a call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import re
import stat
import tempfile
import time
import zlib
from collections.abc import Iterator
from typing import Any

log = logging.getLogger("foregrad")
_say_once = functools.cache(log.warning)

_MAGIC = b"foregrad cache 1 "
_DIGITS = 64
_ENDING = ".entry"
_WRITING = ".writing-"
_NAME = re.compile(rf"[0-9a-f]{{{_DIGITS}}}{re.escape(_ENDING)}")
_MOST_JSON = 512 << 20
_ABANDONED_S = 3600.0  # an unfinished file older than this many seconds has no writer any more
_ROOM = 0.9  # fraction of the limit that is kept when it is passed, so that not every write removes files


def default_folder() -> str:
    """The folder of the cache if the setting `cache_dir` names none."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(home, "foregrad", "compiled")


class _RefusedError(Exception):
    """A folder or file that can't be trusted, or a file that is no entry; the message is the reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredEntry:
    """An entry as `ls` and `verify` show it. `fault`: the reason why it can't be used, None for a good one."""

    key: str
    path: str
    nbytes: int
    used: float
    about: dict[str, Any]
    fault: str | None = None


class Store:
    """The entries in one folder, of `limit` bytes at most."""

    def __init__(self, folder: str, limit: int) -> None:
        self.folder = os.path.abspath(os.path.expanduser(folder))
        self.limit = limit

    def path(self, key: str) -> str:
        return os.path.join(self.folder, key + _ENDING)

    # ---------------------------------------------------------------- reading

    def read(self, key: str) -> Any:
        """The content written under `key`; None if there is no usable entry."""
        path = self.path(key)
        try:
            self._check_folder()
            content = _parsed(_content(path), key)["content"]
        except FileNotFoundError:
            return None
        except _RefusedError as why:
            _say_once(f"an entry of the cache in {self.folder} is not used: {why}")
            return None
        except OSError as error:
            self._say_useless(error)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return content

    def entries(self) -> list[StoredEntry]:
        """All entries, the one used last first, each checked as for reading."""
        try:
            self._check_folder()
        except FileNotFoundError:
            return []
        entries = []
        for name in sorted(os.listdir(self.folder)):
            path, key = os.path.join(self.folder, name), name.removesuffix(_ENDING)
            if _NAME.fullmatch(name) is None:
                continue
            about, fault = {}, None
            try:
                status = os.lstat(path)
                about = dict(_parsed(_content(path), key)["about"])
            except FileNotFoundError:
                continue  # removed meanwhile
            except (_RefusedError, OSError) as why:
                fault = str(why)
            entries.append(StoredEntry(key, path, status.st_size, status.st_mtime, about, fault))
        return sorted(entries, key=lambda entry: (-entry.used, entry.key))

    def refused(self) -> str | None:
        """The reason why nothing in the folder is read; None if it is read."""
        try:
            self._check_folder()
        except FileNotFoundError:
            return None
        except (OSError, _RefusedError) as why:
            return str(why)
        return None

    def _check_folder(self) -> None:
        status = os.stat(self.folder)
        if not stat.S_ISDIR(status.st_mode):
            raise _RefusedError(f"{self.folder} is no folder")
        _check_private(status, self.folder)

    # ---------------------------------------------------------------- writing

    def write(self, key: str, about: dict[str, Any], content: Any) -> None:
        """Keep `content`, a JSON value, under `key`. `about` is for people."""
        text = json.dumps({"key": key, "about": about, "content": content}, separators=(",", ":"), allow_nan=False)
        body = zlib.compress(text.encode(), 1)
        digest = hashlib.sha256(body).hexdigest().encode()
        try:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            self._check_folder()
            self._put(self.path(key), _MAGIC + digest + b"\n" + body)
            self._make_room()
        except _RefusedError as why:
            _say_once(f"nothing is kept in the cache in {self.folder}: {why}")
        except OSError as error:
            self._say_useless(error)

    def _put(self, path: str, content: bytes) -> None:
        handle, temporary = tempfile.mkstemp(prefix=_WRITING, dir=self.folder)  # only this user may read it
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _make_room(self) -> None:
        """Remove the entries used longest ago while the size is over the limit, and files of killed writers."""
        files, total = [], 0
        for item, status in self._files():
            if item.name.startswith(_WRITING):
                if status.st_mtime < time.time() - _ABANDONED_S:
                    _unlink(item.path)
            elif _NAME.fullmatch(item.name):
                files.append((status.st_mtime_ns, item.name, status.st_size, item.path))
                total += status.st_size
        if total <= self.limit:
            return
        for _, _, size, path in sorted(files):
            if total <= self.limit * _ROOM:
                break
            _unlink(path)
            total -= size

    def clear(self) -> int:
        """Remove every entry; returns their number."""
        count = 0
        with contextlib.suppress(FileNotFoundError):
            self._check_folder()
            for item, _ in self._files():
                if _NAME.fullmatch(item.name) or item.name.startswith(_WRITING):
                    count += _NAME.fullmatch(item.name) is not None
                    _unlink(item.path)
        return count

    def _files(self) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
        with os.scandir(self.folder) as items:
            for item in items:
                with contextlib.suppress(OSError):
                    yield item, item.stat(follow_symlinks=False)

    def _say_useless(self, error: OSError) -> None:
        why = error.strerror or str(error)
        _say_once(
            f"the cache in {self.folder} can't be used ({why}): the next process compiles again. Set "
            "FOREGRAD_CACHE_DIR to a folder of yours, or FOREGRAD_CACHE=0."
        )


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _check_private(status: os.stat_result, what: str) -> None:
    if not hasattr(os, "geteuid"):
        return  # Windows, where folders in the user's profile are the user's
    if status.st_uid != os.geteuid():
        raise _RefusedError(f"{what} belongs to a different user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _RefusedError(f"{what} is writable by other users (chmod go-w)")


def _content(path: str) -> bytes:
    """The bytes of an entry's file, if it is a plain file of the user's own."""
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0)
    for name in ("O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK"):  # a pipe would block
        flags |= getattr(os, name, 0)
    try:
        handle = os.open(path, flags)
    except OSError as error:
        if os.path.islink(path):
            raise _RefusedError(f"{path} is a link") from error
        raise
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise _RefusedError(f"{path} is no plain file")
        _check_private(status, path)
        return file.read()


def _parsed(content: bytes, key: str) -> dict[str, Any]:
    """The JSON of an entry, after its checksum and its key were checked."""
    head = len(_MAGIC) + _DIGITS + 1
    if not content.startswith(_MAGIC) or len(content) <= head or content[head - 1 : head] != b"\n":
        raise _RefusedError(f"{key[:16]}... is no entry of this version, or is cut off")
    body = memoryview(content)[head:]
    if hashlib.sha256(body).hexdigest().encode() != content[len(_MAGIC) : head - 1]:
        raise _RefusedError(f"{key[:16]}... is damaged: its checksum is not that of its content")
    try:
        unpacker = zlib.decompressobj()
        entry = json.loads(unpacker.decompress(body, _MOST_JSON))
    except (ValueError, zlib.error, RecursionError) as error:
        raise _RefusedError(f"{key[:16]}... holds no JSON ({error})") from None
    if type(entry) is not dict or entry.keys() != {"key", "about", "content"} or entry["key"] != key:
        raise _RefusedError(f"{key[:16]}... is the entry of a different key")
    return entry
