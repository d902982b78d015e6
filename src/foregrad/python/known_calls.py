"""The closed world: calls into C that are known to be pure, and methods that write to their object.

While a function is captured, each of its actions is an operator on tensors, a read or write of a tracked holder, or a
call of a function in the table below. Anything else makes the call eager, by name: see `tracing/effects/ observed.py`,
which reads the table. `docs/closed_world.md` is generated from the table. Installed packages add to it (`GROUP`).

Not seen by the interpreter's events, before Python 3.12 or at all: calls that C makes by itself (a method handed to
`map`), called objects of C (ufuncs; code that names a function of ctypes or Cython is refused), and operators (`a[i] =
x`), found by comparing the holders. Writes of a C function to arguments besides its own object are not listed:
`heapq.heappush`.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.metadata
import locale
import logging
import random
import sys
import types
import warnings
from _ctypes import CFuncPtr
from typing import Any, Final

import torch

from ._torch.settings import SETTERS
from .libraries import HASHES, is_standard

PURE: Final = 0
WRITES: Final = 1
"""It writes to the object that it is a method of: fine for what the call makes, and for what is tracked."""
REFUSED: Final = 2

LOOKED_AT: Final = 0
TRUSTED: Final = 1
"""Code whose calls into C are known as a whole."""
OPAQUE: Final = 2
"""Code that is trusted with all that it calls."""

EVERYTHING: Final = "*"

_WHOLE: Final = (
    "_abc _ast _bisect _codecs _collections _collections_abc _contextvars _csv _datetime _functools _hashlib "
    "_blake2 _md5 _sha1 _sha2 _heapq _imp _json _opcode _operator _sre _stat _statistics _string _struct "
    "_tracemalloc _typing _weakref array binascii cmath itertools math unicodedata zlib"
)
PURE_FUNCTIONS: Final[dict[str, str]] = {
    **dict.fromkeys(_WHOLE.split(), EVERYTHING),
    "builtins": (
        "__build_class__ abs aiter all anext any ascii bin callable chr compile delattr dir divmod eval exec format "
        "getattr globals hasattr hex isinstance issubclass iter len locals max min next oct ord pow repr round "
        "setattr sorted sum vars __import__"  # attributes that are set are found by comparing
    ),
    "_decimal": "IEEEContext getcontext localcontext",
    "decimal": "IEEEContext getcontext localcontext",
    "_locale": "localeconv strcoll strxfrm getlocale",
    "_pickle": "dumps loads",
    "_thread": "RLock allocate_lock get_ident get_native_id stack_size",
    "_warnings": "_filters_mutated _filters_mutated_lock_held",
    "gc": ("collect get_objects get_referents get_referrers is_tracked"),
    "io": "text_encoding",
    "_io": "text_encoding",
    "marshal": "dumps loads",
    "posix": "fspath",
    "nt": "fspath",
    "sys": (
        "_getframemodulename _is_gil_enabled exc_info exception getdefaultencoding getfilesystemencoding "
        "getsizeof intern is_finalizing"
    ),
}
"""Modules of C, and which of their functions neither write to anything but what they return, nor look at what is not
tracked. What is asked of clocks and random generators has a way of its own, see `opaque`."""

_SEQUENCE = "append clear extend insert pop remove reverse"
_MAPPING = "__missing__ clear pop popitem setdefault update"
WRITING_METHODS: Final[dict[str, str]] = {
    "builtins.list": f"{_SEQUENCE} sort",
    "builtins.dict": _MAPPING,
    "builtins.set": (
        "add clear difference_update discard intersection_update pop remove symmetric_difference_update update"
    ),
    "builtins.bytearray": _SEQUENCE,
    "collections.OrderedDict": f"{_MAPPING} move_to_end",
    "collections.defaultdict": _MAPPING,
    "collections.deque": f"{_SEQUENCE} appendleft extendleft popleft rotate",
    "array.array": f"{_SEQUENCE} byteswap frombytes fromfile fromlist fromunicode",
    "_contextvars.ContextVar": "reset set",
    "decimal.Context": "clear_flags clear_traps",
    "_io.StringIO": "__exit__ __setstate__ close read readline readlines seek truncate write writelines",
    "_io.BytesIO": "__exit__ __setstate__ close read read1 readinto readline readlines seek truncate write writelines",
    "_io._IOBase": "readlines writelines",
    "_random.Random": "getrandbits random seed setstate",
}
"""Classes of C, and which of their methods write to the object. `module.qualname`; all others of these are pure."""

PURE_CLASSES: Final = frozenset(
    """
    _collections._tuplegetter _contextvars.Context _contextvars.Token _json.Encoder _json.Scanner
    _multiprocessing.SemLock _sre.SRE_Scanner _struct.Struct _thread.RLock _thread._local _thread.lock
    builtins.BaseException builtins.BaseExceptionGroup builtins.ImportError builtins.OSError
    builtins.SimpleNamespace builtins.UnicodeError builtins.bool builtins.builtin_function_or_method builtins.bytes
    builtins.cell builtins.classmethod builtins.code builtins.complex builtins.coroutine builtins.dict_itemiterator
    builtins.dict_items builtins.dict_keyiterator builtins.dict_keys builtins.dict_valueiterator
    builtins.dict_values builtins.ellipsis builtins.enumerate builtins.filter builtins.float builtins.frame
    builtins.frozenset builtins.function builtins.generator builtins.getset_descriptor builtins.int
    builtins.iterator builtins.list_iterator builtins.list_reverseiterator builtins.map builtins.mappingproxy
    builtins.member_descriptor builtins.memoryview builtins.method builtins.method-wrapper
    builtins.method_descriptor builtins.module builtins.object builtins.odict_items builtins.odict_keys
    builtins.odict_values builtins.property builtins.range builtins.range_iterator builtins.reversed
    builtins.set_iterator builtins.slice builtins.staticmethod builtins.str builtins.str_iterator builtins.super
    builtins.traceback builtins.tuple builtins.tuple_iterator builtins.type builtins.weakcallableproxy
    builtins.weakproxy builtins.weakref builtins.wrapper_descriptor builtins.zip datetime.date datetime.datetime
    datetime.time datetime.timedelta datetime.timezone datetime.tzinfo decimal.ContextManager decimal.Decimal
    decimal.SignalDictMixin functools._lru_cache_wrapper functools.partial operator.attrgetter operator.itemgetter
    operator.methodcaller re.Match re.Pattern types.GenericAlias types.SimpleNamespace types.UnionType
    typing.Generic typing.ParamSpec typing.ParamSpecArgs typing.ParamSpecKwargs typing.TypeAliasType typing.TypeVar
    typing.TypeVarTuple uuid.UUID weakref.CallableProxyType weakref.ProxyType weakref.ReferenceType zlib.Compress
    zlib.Decompress
    """.split()
)
"""Classes of C whose methods, `WRITING_METHODS` apart, write to nothing else. Iterators that are older than the call
are looked after by what stands in for them."""

_LOCKED = "__enter__ acquire acquire_lock locked locked_lock"
REFUSED_METHODS: Final[dict[str, str]] = {
    "builtins.BaseException": "add_note",
    "datetime.date": "today",
    "datetime.datetime": "now utcnow",
    "functools._lru_cache_wrapper": "cache_clear",
    "functools.partial": "__setstate__",
    "_thread.lock": _LOCKED,  # work of further threads is no part of a graph; a held lock is let go
    "_thread.RLock": _LOCKED,
}

_REFUSED_FUNCTIONS: Final = (
    *(logging.Logger.setLevel, logging.Logger.addHandler, logging.Logger.removeHandler, logging.Handler.setLevel),
    *(logging.Handler.setFormatter, logging.Filterer.addFilter, logging.Filterer.removeFilter),
    *(logging.basicConfig, logging.disable, locale.setlocale, torch.utils.data.DataLoader.__iter__),
    *SETTERS,
    *(random.SystemRandom.random, random.SystemRandom.getrandbits, random.SystemRandom.randbytes),
)
REFUSED_CODE: Final = frozenset(function.__code__ for function in _REFUSED_FUNCTIONS)
"""Python of modules that are not looked at which writes to what nobody tracks, or reads anew in each call."""
REFUSED_NAMES: Final = {"numpy": "seterr set_printoptions", "uuid": "uuid1 uuid4 uuid6 uuid7 uuid8"}
"""More of them, by package and name: the package may be imported later, or lack some in older versions."""

DIVERTED: Final = (id, hash, warnings.warn, gc.collect, sys._getframe)
"""A capture is told of these with their arguments, by the C++ part; without it they are refused."""

KNOWN_PACKAGES: Final = tuple(
    "torch torchgen functorch numpy sympy mpmath foregrad foregrad_native typing_extensions".split()
)
"""Packages whose functions of C are operators, or are looked after by a way of their own; sympy works out sizes, and
`typing_extensions` wraps functions that are deprecated."""

NOT_OF_PACKAGES: Final[dict[str, str]] = {
    "torch._C": (
        "_set_worker_signal_handlers _set_worker_pids _error_if_any_worker_fails _log_api_usage_metadata_ "
        "_initExtension _load_for_lite_interpreter _to_dlpack _set_view_replay_enabled"
    )
}
"""Their functions that are no operators: they set something for the whole process, or hand memory on."""

TRUSTED_MODULES: Final = frozenset(
    """
    __future__ _collections_abc _py_abc _sitebuiltins _strptime _weakrefset abc ast base64 bisect calendar codecs
    colorsys contextlib copy copyreg dataclasses datetime difflib dis enum fnmatch fractions functools
    graphlib heapq html inspect ipaddress json keyword linecache locale numbers opcode operator random
    re reprlib secrets shlex sre_compile sre_constants sre_parse statistics string stringprep struct symtable textwrap
    timeit token tokenize traceback types typing uuid warnings weakref _py_warnings _pydatetime _pydecimal
    _threading_local
    """.split()
)
"""Modules whose Python does to C what the table would allow, or keeps what nobody can see. What a function that is
deprecated warns of (`typing_extensions`, `warnings`) is said at the capture, as once in a process by default."""

OPAQUE_MODULES: Final = frozenset(
    {"importlib", "_frozen_importlib", "_frozen_importlib_external", "zipimport", "runpy", "logging"}
)
"""A module that is imported runs once for the process, in eager as well; of what is logged a capture is told before."""


GROUP: Final = "foregrad.pure"
"""The group of entry points for pure C code of packages: `module`, `module:function`, `module:Class` or
`module:Class.method`. Nothing is loaded. Entries for the standard library have no effect."""


@functools.cache
def _declared() -> frozenset[str]:
    entries = importlib.metadata.entry_points(group=GROUP)
    own = (entry for entry in entries if entry.module.partition(".")[0] not in sys.stdlib_module_names)
    return frozenset(f"{entry.module}.{entry.attr or ''}".rstrip(".") for entry in own)


def _unless_declared(*names: str) -> int:
    """PURE if an installed package declares any of the names pure, else REFUSED."""
    return REFUSED if _declared().isdisjoint(names) else PURE


def kind_of_call(callee: Any) -> int:
    """PURE, WRITES or REFUSED, of a function or bound method of C."""
    if callee in DIVERTED:
        return PURE
    owner = callee.__self__
    name = callee.__name__
    if owner is None:  # a static method: only the collector knows its class
        owner = next((held for held in gc.get_referents(callee) if isinstance(held, type)), None)
    if owner is None or isinstance(owner, types.ModuleType):
        return _kind_of_function(str(callee.__module__ or getattr(owner, "__name__", "")), name)
    if isinstance(owner, torch.autograd.graph.Node):  # their classes name no module
        return PURE
    of_type = owner if isinstance(owner, type) else type(owner)
    for cls in of_type.__mro__:
        if isinstance(cls.__dict__.get(name), _OF_C):
            return _kind_of_method(cls, name)
    for cls in type(owner).__mro__:
        if isinstance(cls.__dict__.get(name), _OF_C):
            return _kind_of_method(cls, name)
    module = str(getattr(callee, "__module__", None) or of_type.__module__)
    return PURE if module.partition(".")[0] in KNOWN_PACKAGES else _unless_declared(module, f"{module}.{name}")


def _kind_of_function(module: str, name: str) -> int:
    root = module.partition(".")[0]
    if root in KNOWN_PACKAGES:
        return REFUSED if name in NOT_OF_PACKAGES.get(module, "").split() else PURE
    known = PURE_FUNCTIONS.get(module)
    is_known = known is not None and (known == EVERYTHING or name in known.split())
    return PURE if is_known else _unless_declared(module, f"{module}.{name}")


def _kind_of_method(cls: type, name: str) -> int:
    if cls.__module__.partition(".")[0] in KNOWN_PACKAGES:
        return PURE
    qualified = f"{cls.__module__}.{cls.__qualname__}"
    if name in WRITING_METHODS.get(qualified, "").split():
        return WRITES
    if name in REFUSED_METHODS.get(qualified, "").split():
        return REFUSED
    if qualified in WRITING_METHODS or qualified in PURE_CLASSES or issubclass(cls, BaseException):
        return PURE
    if cls.__module__ == "itertools" or (cls.__module__ in HASHES and name != "update"):
        return PURE
    return _unless_declared(cls.__module__, qualified, f"{qualified}.{name}")


def is_called_in_c(cls: type) -> bool:
    return isinstance(getattr(cls, _CALL, None), types.WrapperDescriptorType) or issubclass(cls, ctypes.CDLL)


def is_untold(value: Any) -> bool:
    """Whether unknown C runs where an object is called, and no event of the interpreter tells of the call."""
    if isinstance(value, (ctypes.CDLL, CFuncPtr)):
        return True
    cls = type(value)
    if isinstance(value, type) or not is_called_in_c(cls):
        return False
    module = str(getattr(value, "__module__", None) or cls.__module__)
    roots = {name.partition(".")[0] for name in (module, cls.__module__)}
    is_unknown = roots.isdisjoint(KNOWN_PACKAGES) and roots.isdisjoint(sys.stdlib_module_names)
    return is_unknown and _unless_declared(module, f"{module}.{getattr(value, '__name__', '')}") == REFUSED


_CALL = "__call__"
_OF_C = (types.MethodDescriptorType, types.ClassMethodDescriptorType, types.BuiltinFunctionType, staticmethod)


def trust_in(module: Any, file: str, name: str = "") -> int:
    """How far the Python code of a function is looked at, by its module, file and name."""
    if not isinstance(module, str):
        return LOOKED_AT
    root = module.partition(".")[0]
    if root in KNOWN_PACKAGES:
        return TRUSTED
    if not is_standard(file):
        return LOOKED_AT
    if root in OPAQUE_MODULES or (module, name) in _OF_THE_COLLECTOR:
        return OPAQUE
    return TRUSTED if root in TRUSTED_MODULES else LOOKED_AT


_OF_THE_COLLECTOR = {("weakref", "__call__"), ("weakref", "remove"), ("_weakrefset", "_remove")}
