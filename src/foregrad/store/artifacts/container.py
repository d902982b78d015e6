"""The file of an artifact: a zip of JSON and safetensors, sealed by a checksum over all of its bytes.

    manifest.json          versions, the state's names and layouts, sizes and SHA-256 of the other members
    programs/0.json ...    one specialization each
    tensors.safetensors    weights and constants, not compressed

The zip's comment ends the file: `foregrad ` and the SHA-256 of everything before those 64 digits. A file that differs
in one bit is refused before any member is read. Members have fixed names, and none is unpacked to disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import re
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

import torch

from ..._torch.symbols import Size
from ..._torch.tensors import storage_key
from ...errors import ArtifactError, ForegradError
from ...graph.meta import TensorSpec
from ..serialize.values import Reader, Writer, checked

FORMAT, VERSION, OLDEST = "foregrad artifact", 2, 1
MANIFEST, TENSORS = "manifest.json", "tensors.safetensors"
_SEAL = b"foregrad "
_DIGITS = 64
_MOST_JSON = 128 << 20  # bytes of JSON in a file
_MOST_RATIO = 200  # of JSON's size to its compressed size; ours is 5 to 30
_MOST_MEMBERS = 1024
_DEEPEST_JSON = 512
_MOST_PARSED = 16 << 20  # bytes of the objects that JSON is parsed to
_MOST_PARSED_RATIO = 400  # the ratio of the objects' bytes to the compressed size; ours is 10 to 230
_MOST_PARSED_BYTES = 32  # the ratio to the bytes of JSON; ours is 6 to 9, and 24 where all are numbers of one digit
_BYTES_OF = {b"{": 240, b"[": 72, b",": 48}  # of an object, a list, an item, at most
_STRING = re.compile(rb'"[^"]*"')
_NOT_MARKS = bytes(set(range(256)) - set(b'[]{},"'))
_CHUNK = 1 << 20
_WHEN = (1980, 1, 1, 0, 0, 0)


class Contents:
    """The members of an artifact's file, each read on demand."""

    def __init__(self, archive: zipfile.ZipFile, path: str) -> None:
        self._archive, self._path = archive, path
        self._left = _MOST_JSON
        infos = archive.infolist()
        names = [info.filename for info in infos]
        if not 0 < len(infos) <= _MOST_MEMBERS or names[0] != MANIFEST:
            raise ArtifactError("it has no manifest")
        self.manifest = self._json(MANIFEST)
        if type(self.manifest) is not dict or self.manifest.get("format") != FORMAT:
            raise ArtifactError("it is a zip file, but none of foregrad's")
        version = self.manifest.get("version")
        if type(version) is not int or not OLDEST <= version <= VERSION:
            raise ArtifactError(
                f"it has version {str(version)[:20]} of the format, this foregrad reads {OLDEST} to {VERSION}: save "
                "it again with this foregrad, or read it with the foregrad that saved it "
                f"({str(self.manifest.get('foregrad'))[:40]})"
            )
        self._listed: Mapping[str, Any] = self.manifest["members"]
        expected = [*(f"programs/{number}.json" for number in range(len(names) - 2)), TENSORS]
        if names[1:] != list(self._listed) or names[1:] != expected:
            raise ArtifactError(f"its members differ from its manifest: {', '.join(names[1:])[:200]}")
        for info in infos[1:]:
            if info.file_size != self._listed[info.filename]["bytes"]:
                raise ArtifactError(f"{info.filename} has {info.file_size} bytes, its manifest says otherwise")

    def json(self, name: str) -> Any:
        """The value of a JSON member. Raises `ArtifactError` if it is missing, damaged or too large."""
        if name not in self._listed:
            raise ArtifactError(f"it has no {name}")
        return self._json(name, self._listed[name]["sha256"])

    def tensors(self) -> bytes:
        """The bytes of the member that holds tensors."""
        info = self._archive.getinfo(TENSORS)
        size = os.path.getsize(self._path) if self._path else info.compress_size
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.file_size > size:
            raise ArtifactError(f"{TENSORS} is compressed, or larger than the file")
        content = self._archive.read(info)
        _compare(content, self._listed[TENSORS]["sha256"], TENSORS)
        return content

    def _json(self, name: str, digest: Any = None) -> Any:
        info = self._archive.getinfo(name)
        allowed = min(self._left, 4096 + _MOST_RATIO * info.compress_size)
        if info.compress_type != zipfile.ZIP_DEFLATED or info.flag_bits & 1 or info.file_size > allowed:
            raise ArtifactError(f"{name} claims {info.file_size} bytes, more than it may have")
        with self._archive.open(info) as file:
            content = file.read(allowed + 1)
        if len(content) != info.file_size:
            raise ArtifactError(f"{name} does not have the {info.file_size} bytes that it claims")
        self._left -= len(content)
        if digest is not None:
            _compare(content, digest, name)
        _check_json(content, name, _MOST_PARSED + _MOST_PARSED_RATIO * info.compress_size)
        return json.loads(content, parse_constant=_no_constant, object_pairs_hook=_without_repeats)


def _check_json(content: bytes, name: str, most: int) -> None:
    """Raise `ArtifactError` if parsed JSON would take more than `most` bytes, or is nested too deeply."""
    marks = content.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NOT_MARKS)
    structure = _STRING.sub(b"", marks.replace(b'""', b""))
    most = min(most, _MOST_PARSED + _MOST_PARSED_BYTES * len(content))
    if len(content) + sum(size * structure.count(what) for what, size in _BYTES_OF.items()) > most:
        raise ArtifactError(f"{name} holds more values than it may have")
    brackets = structure.translate(None, b',"')
    depths = itertools.accumulate(1 if bracket in b"[{" else -1 for bracket in brackets)
    if max(depths, default=0) > _DEEPEST_JSON:
        raise ArtifactError(f"{name} is nested too deeply")


def _no_constant(text: str) -> Any:
    raise ArtifactError(f"{text} is no number")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    items = dict(pairs)
    if len(items) != len(pairs):
        raise ArtifactError("an object with a key twice")
    return items


def _compare(content: bytes, digest: Any, name: str) -> None:
    if hashlib.sha256(content).hexdigest() != digest:
        raise ArtifactError(f"the checksum of {name} is not that of its content")


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Context: any error with data from a file becomes an `ArtifactError` that names the file."""
    try:
        yield
    except ArtifactError as error:
        raise ArtifactError(f"{what} can't be read: {error}") from None
    except OSError as error:
        raise ArtifactError(f"{what} can't be read: {error.strerror or error}") from error
    except (
        AttributeError, EOFError, LookupError, OverflowError, RecursionError, RuntimeError, TypeError, ValueError,
        ArithmeticError, AssertionError, NotImplementedError, zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error,
        ForegradError,
    ) as error:  # fmt: skip
        text = str(error).partition("\n")[0][:200]
        raise ArtifactError(f"{what} can't be read: it is damaged, or not an artifact of foregrad ({text})") from error


@contextlib.contextmanager
def opened(path: str) -> Iterator[Contents]:
    """Context: the contents of the artifact's file at `path`. Raises `ArtifactError` for any fault of the file."""
    with refusing(path):
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ArtifactError("it is no file")
        with open(path, "rb") as file, reading(file, path) as contents:
            yield contents


@contextlib.contextmanager
def reading(file: IO[bytes], path: str = "") -> Iterator[Contents]:
    """Context: the contents of an artifact's file, after its checksum was checked."""
    _check_seal(file)
    with zipfile.ZipFile(file) as archive:
        yield Contents(archive, path)


def _check_seal(file: IO[bytes]) -> None:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if file.read(2) != b"PK":
        raise ArtifactError("it is no artifact of foregrad: artifacts begin as zip files do")
    if size < len(_SEAL) + _DIGITS + 22:
        raise ArtifactError("it is cut off")
    file.seek(size - len(_SEAL) - _DIGITS)
    seal, digits = file.read(len(_SEAL)), file.read(_DIGITS)
    if seal != _SEAL:
        raise ArtifactError("it is cut off, or no artifact of foregrad's: the checksum at its end is missing")
    if _digest_of(file, size - _DIGITS) != digits:
        raise ArtifactError("its checksum is not that of its content: it was damaged or changed")
    file.seek(0)


def _digest_of(file: IO[bytes], left: int) -> bytes:
    """The SHA-256 of the first bytes of a file, as hexadecimal digits."""
    file.seek(0)
    digest = hashlib.sha256()
    while left:
        chunk = file.read(min(_CHUNK, left))
        if not chunk:
            raise ArtifactError("it became shorter while it was read")
        digest.update(chunk)
        left -= len(chunk)
    return digest.hexdigest().encode()


# ------------------------------------------------------------------------------------------------------ writing


class _Archive(zipfile.ZipFile):
    """A zip file with an end that only `close` writes, so a file cut off by an error or an interrupt stays cut off."""

    def __del__(self) -> None:
        pass


def pack(file: IO[bytes], manifest: dict[str, Any], programs: list[Any], tensors: bytes) -> None:
    """Write an artifact; equal contents give equal bytes."""
    members = {f"programs/{number}.json": _dumped(program) for number, program in enumerate(programs)}
    members[TENSORS] = tensors
    listed = {name: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for name, c in members.items()}
    head = {"format": FORMAT, "version": VERSION, **manifest, "members": listed}
    archive = _Archive(file, "w")
    for name, content in {MANIFEST: _dumped(head, sort=False), **members}.items():
        info = zipfile.ZipInfo(name, _WHEN)
        info.create_system, info.external_attr = 3, 0o600 << 16
        info.compress_type = zipfile.ZIP_STORED if name == TENSORS else zipfile.ZIP_DEFLATED
        archive.writestr(info, content, compresslevel=9)
    archive.comment = _SEAL + b"0" * _DIGITS
    archive.close()
    size = file.seek(0, os.SEEK_END)
    digest = _digest_of(file, size - _DIGITS)
    file.seek(size - _DIGITS)
    file.write(digest)


def _dumped(value: Any, *, sort: bool = True) -> bytes:
    text = json.dumps(value, separators=(",", ":"), sort_keys=sort, ensure_ascii=True, allow_nan=False)
    return text.encode()


def write_file(path: str, write: Callable[[IO[bytes]], None]) -> None:
    """Write a file at `path`, or at the end of a link there; after an error the old file is unchanged."""
    path = os.path.realpath(path)
    before = os.stat(path).st_mode if os.path.exists(path) else None
    if before is not None and not stat.S_ISREG(before):
        raise ArtifactError(f"an artifact can't be saved to {path}: it is a folder, a device or a pipe, and no file")
    mask = os.umask(0)
    os.umask(mask)
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=".foregrad-", dir=os.path.dirname(path))
        with os.fdopen(handle, "w+b") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~mask if before is None else stat.S_IMODE(before))
        os.replace(temporary, path)
    except BaseException:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise


# -------------------------------------------------------------------- state
# The tensors of an artifact: parameters, buffers and constants, by name, and as safetensors.
#
# safetensors keeps contiguous tensors over memory of their own. Other layouts are kept so that they can be restored: a
# tensor whose strides leave no gaps is kept contiguous beside its strides, complex numbers are kept as pairs, and
# tensors that share memory as the memory and each tensor's place there.

KINDS = ("parameter", "buffer", "temporary buffer", "tensor", "constant")
_LONGEST_NAME = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class StateEntry:
    """One tensor that an artifact holds.

    `kind`: "parameter", "buffer", "temporary buffer" (not in the `state_dict`), "tensor" (that the function closed
    over) or "constant" (of a graph). `aliases`: its other names in the module.
    """

    name: str
    kind: str
    tensor: torch.Tensor
    requires_grad: bool = False
    aliases: tuple[str, ...] = ()


def _library() -> Any:
    try:
        import safetensors.torch as library
    except ImportError as error:
        raise ArtifactError("artifacts need the package safetensors: pip install safetensors") from error
    return library


def dump_tensors(entries: Sequence[StateEntry]) -> tuple[list[dict[str, Any]], list[Any], bytes]:
    """(the tensors' entries in the manifest, their layouts, the tensors as safetensors)."""
    writer, stored, data = Writer(), {}, []
    shared: dict[int, list[StateEntry]] = {}
    for entry in entries:
        _check_storable(entry)
        if entry.tensor.numel():
            shared.setdefault(storage_key(entry.tensor), []).append(entry)
    memories: dict[int, tuple[str, Size]] = {}
    for key, group in shared.items():
        specs = [TensorSpec.of(entry.tensor) for entry in group]
        if len(group) > 1 or not specs[0].is_dense:
            name = f"memory.{len(memories)}"
            memories[key], stored[name] = _memory(group, specs, name)
    for entry in entries:
        tensor, key = entry.tensor.detach(), storage_key(entry.tensor) if entry.tensor.numel() else 0
        spec = TensorSpec.of(tensor)
        described: dict[str, Any] = {"name": entry.name, "kind": entry.kind}
        described |= {"requires_grad": True} if entry.requires_grad else {}
        described |= {"aliases": list(entry.aliases)} if entry.aliases else {}
        if key in memories:
            name, start = memories[key]
            spec = TensorSpec(spec.shape, spec.stride, spec.dtype, spec.device, spec.offset - start)
            data.append(described | {"layout": writer.layout(spec), "memory": name})
            continue
        spec = spec.fresh(spec.shape, spec.stride)
        content = tensor.cpu()
        content = torch.view_as_real(content.resolve_conj()) if content.is_complex() else content
        stored[entry.name] = content.contiguous()
        data.append(described | {"layout": writer.layout(spec), "stored": entry.name})
    library = _library()
    try:
        return data, writer.tables()["layouts"], library.save(stored)
    except Exception as error:
        raise ArtifactError(f"its tensors can't be stored: {error}") from error


def _check_storable(entry: StateEntry) -> None:
    tensor = entry.tensor
    if len(entry.name) > _LONGEST_NAME or not entry.name.isprintable():
        raise ArtifactError(f"a tensor has a name that can't be stored: {entry.name[:80]!r}")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta" or tensor.is_neg():
        raise ArtifactError(f"the {entry.kind} {entry.name} is a {tensor.layout} tensor on {tensor.device}")


def _memory(group: list[StateEntry], specs: list[TensorSpec], name: str) -> tuple[tuple[str, Size], torch.Tensor]:
    """The memory that a group of tensors lies in, with its place in the file."""
    first = group[0].tensor.detach()
    if any(spec.dtype is not first.dtype or spec.conj for spec in specs):
        names = ", ".join(entry.name for entry in group)
        raise ArtifactError(f"{names} share memory under several dtypes")
    start = min(spec.offset for spec in specs)
    end = max(spec.offset + spec.nbytes // spec.dtype.itemsize for spec in specs)
    content = first.as_strided((end - start,), (1,), start).cpu().clone()
    return (name, start), torch.view_as_real(content) if content.is_complex() else content


def read_tensors(data: Any, layouts: Any, content: bytes) -> list[StateEntry]:
    """The entries from the data of `dump_tensors`. Raises `ArtifactError` for any other data."""
    library = _library()
    try:
        stored: Mapping[str, torch.Tensor] = library.load(content)
    except Exception as error:  # of the library's own class
        raise ArtifactError(f"its tensors can't be read: {error}") from error
    reader = Reader({"operators": [], "lines": [], "layouts": layouts})
    entries: list[StateEntry] = []
    seen: set[str] = set()
    used: set[str] = set()
    for item in checked(data, list):
        name, kind = checked(item["name"], str), item["kind"]
        aliases = tuple(checked(alias, str) for alias in item.get("aliases", ()))
        if kind not in KINDS or not seen.isdisjoint((name, *aliases)) or len(name) > _LONGEST_NAME:
            raise ArtifactError(f"{name[:80]!r} is no name of a tensor of its own")
        seen.update((name, *aliases))
        spec = reader.layout(item["layout"])
        if not spec.is_static:
            raise ArtifactError(f"the size of {name[:80]!r} is symbolic")
        key = checked(item["memory" if "memory" in item else "stored"], str)
        if key not in stored:
            raise ArtifactError(f"there are no values for {name[:80]!r}")
        used.add(key)
        values = stored[key]
        tensor = _view_of(values, spec, name) if "memory" in item else _laid_out(values, spec, name)
        entries.append(StateEntry(name, kind, tensor, checked(item.get("requires_grad", False), bool), aliases))
    if used != set(stored):
        raise ArtifactError("it has values for tensors that it does not name")
    return entries


def _numbers(values: torch.Tensor, spec: TensorSpec, name: str) -> torch.Tensor:
    if spec.dtype.is_complex and not values.is_complex():
        if values.dim() == 0 or values.shape[-1] != 2 or values.dtype is not spec.dtype.to_real():
            raise ArtifactError(f"the values of {name[:80]!r} are no complex numbers")
        values = torch.view_as_complex(values.contiguous())
    if values.dtype is not spec.dtype:
        raise ArtifactError(f"the values of {name[:80]!r} are {values.dtype}, not {spec.dtype}")
    return values.to(spec.device)


def _laid_out(values: torch.Tensor, spec: TensorSpec, name: str) -> torch.Tensor:
    values = _numbers(values, spec, name)
    if tuple(values.shape) != spec.shape:
        raise ArtifactError(f"the values of {name[:80]!r} have the shape {tuple(values.shape)}, not {spec.shape}")
    if values.stride() == spec.stride and values.numel() and not spec.offset:
        return values
    if not spec.is_dense or spec.offset:
        raise ArtifactError(f"the strides of {name[:80]!r} leave gaps")
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device).copy_(values)


def _view_of(values: torch.Tensor, spec: TensorSpec, name: str) -> torch.Tensor:
    values = _numbers(values, spec, name)
    if values.dim() != 1 or not values.is_contiguous():
        raise ArtifactError(f"the memory of {name[:80]!r} is no row of numbers")
    end = spec.offset + spec.nbytes // spec.dtype.itemsize
    if end > values.numel():
        raise ArtifactError(f"{name[:80]!r} lies outside of its memory")
    return values.as_strided(spec.shape, spec.stride, values.storage_offset() + spec.offset)
