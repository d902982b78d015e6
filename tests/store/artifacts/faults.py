"""Damaged artifacts: what can happen to a file, and files that somebody made up, sealed as if they were right."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import random
import struct
import zipfile

SEAL = b"foregrad "


def sealed(members, *, names=None, compress=None, comment=None):
    """An artifact's file with these members, and a checksum that is right."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            info = zipfile.ZipInfo((names or {}).get(name, name), (1980, 1, 1, 0, 0, 0))
            stored = name.endswith(".safetensors")
            info.compress_type = (compress or {}).get(name, zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED)
            archive.writestr(info, content)
        archive.comment = comment if comment is not None else SEAL + b"0" * 64
    return with_seal(file.getvalue())


def with_seal(content):
    content = bytearray(content)
    content[-64:] = hashlib.sha256(content[:-64]).hexdigest().encode()
    return bytes(content)


def members_of(content):
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def repacked(members, *, listed=True, **how):
    """The same after a change of some members, with a manifest that lists them as they are."""
    members = dict(members)
    manifest = json.loads(members["manifest.json"]) if listed else None
    if isinstance(manifest, dict):
        others = {name: c for name, c in members.items() if name != "manifest.json"}
        manifest["members"] = {
            name: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for name, c in others.items()
        }
        members = {"manifest.json": json.dumps(manifest).encode(), **others}
    return sealed(members, **how)


def edited(content, change, member="programs/0.json"):
    """The file after `change(data)` of the JSON in one member."""
    members = members_of(content)
    data = json.loads(members[member])
    result = change(data)
    members[member] = json.dumps(data if result is None else result).encode()
    return repacked(members)


# ---------------------------------------------------------------------------------------------- accidents


def bit_flips(content, count, seed=0):
    choice = random.Random(seed)
    for _ in range(count):
        position = choice.randrange(len(content) * 8)
        changed = bytearray(content)
        changed[position // 8] ^= 1 << position % 8
        yield f"bit {position % 8} of byte {position // 8} flipped", bytes(changed)


def truncations(content, count, seed=0):
    choice = random.Random(seed)
    ends = {0, 1, 2, 3, 22, 64, 65, 73, 74, 95, len(content) - 1, len(content) - 64, len(content) - 73}
    while len(ends) < count:
        ends.add(choice.randrange(len(content)))
    for end in sorted(ends):
        yield f"cut off at byte {end} of {len(content)}", content[:end]


def others(content, count, seed=0):
    choice = random.Random(seed)
    yield "one byte more", content + b"\0"
    yield "twice", content + content
    yield "a byte in front", b"\0" + content
    yield "nothing", b""
    yield "noughts", bytes(1000)
    for number in range(count - 5):
        changed = bytearray(content)
        start, size = choice.randrange(len(content)), choice.randrange(1, 200)
        if number % 2:
            changed[start : start + size] = choice.randbytes(size)[: len(changed[start : start + size])]
            yield f"{size} bytes at {start} overwritten", bytes(changed)
        else:
            del changed[start : start + size]
            yield f"{size} bytes at {start} missing", bytes(changed)


# ---------------------------------------------------------------------------------------------- made up


def containers(content):
    """The zip: names, sizes, members."""
    members = members_of(content)
    yield "no manifest", sealed({n: c for n, c in members.items() if n != "manifest.json"})
    yield "members in another order", sealed(dict(reversed(members.items())))
    for name in (
        "../../evil",
        "/etc/passwd",
        "C:\\evil",
        "programs/../../evil",
        "a\\..\\evil",
        "programs/0.json/",
        "\0",
    ):
        yield f"a member called {name!r}", sealed({**members, name: b"x"})
        yield f"a listed member called {name!r}", repacked({**members, name: b"x"})
        yield f"the tensors are called {name!r}", sealed(members, names={"tensors.safetensors": name})
    for name in members:
        yield f"{name} is missing", sealed({n: c for n, c in members.items() if n != name})
        yield f"{name} is empty", repacked({**members, name: b""}, listed=name != "manifest.json")
        if name != "manifest.json":
            yield f"{name} is not listed so", sealed({**members, name: members[name] + b" "})
        yield f"{name} is cut off", repacked({**members, name: members[name][:-5]}, listed=name != "manifest.json")
    yield (
        "swapped members",
        sealed(
            {**members, "programs/0.json": members["programs/1.json"], "programs/1.json": members["programs/0.json"]}
        ),
    )
    yield "the tensors are compressed", sealed(members, compress={"tensors.safetensors": zipfile.ZIP_DEFLATED})
    yield "JSON that is not compressed", sealed(members, compress={"programs/0.json": zipfile.ZIP_STORED})
    yield "another compression", sealed(members, compress={"programs/0.json": zipfile.ZIP_BZIP2})
    yield "no seal", sealed(members, comment=b"")
    yield "another seal", sealed(members, comment=b"something" + b"0" * 64)
    bomb = b"[" + b"0," * (60 << 20) + b"0]"
    yield "a hundred megabytes of JSON in a few kilobytes", repacked({**members, "programs/0.json": bomb})
    yield "nested too deeply", repacked({**members, "programs/0.json": b"[" * 200_000 + b"]" * 200_000})
    yield "a number of many digits", repacked({**members, "programs/0.json": b"9" * 10_000})
    for number in (0xFFFFFFFF, 1 << 31, 12345):
        yield f"claims {number} bytes", with_seal(claiming(content, number))


def claiming(content, size):
    """The sizes in the zip's directory changed."""
    changed = bytearray(content)
    at = changed.find(b"PK\x01\x02")
    while at >= 0:
        struct.pack_into("<I", changed, at + 24, size)
        at = changed.find(b"PK\x01\x02", at + 4)
    return bytes(changed)


def manifests(content):
    """What the manifest says."""

    def change(key, value):
        def edit(data):
            data[key] = value

        return edit

    for version in (0, 3, 999, "1", None, -1, 1.5, True, [1]):
        if version is True:
            continue  # which is 1
        yield f"version {version!r}", edited(content, change("version", version), "manifest.json")
    for key, values in {
        "format": ["pytorch", None, 3],
        "name": [None, 3, []],
        "tensors": [None, [], [{}], [3], {}, "x"],
        "layouts": [None, [], [{}], [[]], [{"dtype": "float32", "shape": [1 << 62], "stride": [1]}] * 20],
        "specializations": [None, [], [{}] * 5, 3],
        "foregrad": [None],
        "torch": [3],
    }.items():
        for value in values:
            yield f"manifest {key}={str(value)[:40]}", edited(content, change(key, value), "manifest.json")
    yield "a manifest that is a list", edited(content, lambda data: [data], "manifest.json")


def tensors(content):
    """Huge claims and lies about tensors."""

    def layout(**changes):
        def edit(data):
            for entry in data["layouts"]:
                entry.update(changes)

        return edit

    for changes in (
        {"shape": [1 << 40]}, {"shape": [1 << 40, 1 << 20], "stride": [1, 1]}, {"stride": [1 << 50]}, {"stride": [0]},
        {"dtype": "float64"}, {"dtype": "complex64"}, {"dtype": "object"}, {"dtype": 3}, {"shape": [-1]}, {"shape": ["s0"]},
        {"shape": [1] * 100, "stride": [1] * 100}, {"offset": 1 << 40}, {"offset": -4}, {"device": "nowhere"}, {"device": 3},
        {"device": "cuda:99"}, {"conj": 1},
    ):  # fmt: skip
        yield f"layouts {changes}", edited(content, layout(**changes), "manifest.json")
    members = members_of(content)
    data = members["tensors.safetensors"]
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])

    def with_header(change):
        new = copy.deepcopy(header)
        change(new)
        text = json.dumps(new).encode()
        return repacked({**members, "tensors.safetensors": struct.pack("<Q", len(text)) + text + data[8 + size :]})

    first = next(name for name in header if name != "__metadata__")
    for what, change in {
        "offsets past the end": lambda h: h[first].update(data_offsets=[0, 1 << 50]),
        "offsets backwards": lambda h: h[first].update(data_offsets=[8, 0]),
        "a shape past the end": lambda h: h[first].update(shape=[1 << 40]),
        "an unknown dtype": lambda h: h[first].update(dtype="OBJECT"),
        "one more": lambda h: h.update(more=h[first]),
        "one less": lambda h: h.pop(first),
        "another name": lambda h: h.update(other=h.pop(first)),
    }.items():
        yield f"safetensors: {what}", with_header(change)
    for length in (0, 1, 1 << 40, (1 << 63) - 1):
        yield (
            f"safetensors: a header of {length} bytes",
            repacked({**members, "tensors.safetensors": struct.pack("<Q", length) + data[8:]}),
        )


OPERATORS = [
    "os::system", "posix.system", "builtins.exec", "builtins::eval", "aten::from_file", "aten::no_such", "prim::Print", "torch.load",
    "operator.methodcaller", "subprocess::run", "aten::__class__", "__import__", "", None, 7, {}, {"on_copies": "os::system", "writes": []},
    {"in_memory": "aten::add_.Tensor", "memories": [0], "places": [[0, None, 0, 0, 1 << 40]]}, {"on_copies": "aten::add_.Tensor", "writes": [99]},
    "custom_library::not_registered",
]  # fmt: skip


def programs(content):
    """Graphs and signatures: unknown operators, cycles, positions that are not there."""
    for name in OPERATORS:

        def operator(data, name=name):
            data["tables"]["operators"][0] = name

        yield f"operator {name!r}", edited(content, operator)

    def nodes(data, graph="joint"):
        return data["program"][graph]["nodes"]

    def calls(data, graph="joint"):
        return [node for node in nodes(data, graph) if node["op"] == "call_function"]

    edits = {
        "a node that takes itself": lambda d: calls(d)[0].update(args=[{"node": nodes(d).index(calls(d)[0])}]),
        "a node that takes a later one": lambda d: calls(d)[0].update(args=[{"node": len(nodes(d)) - 2}]),
        "a cycle of two": lambda d: (
            calls(d)[0].update(args=[{"node": nodes(d).index(calls(d)[1])}]),
            calls(d)[1].update(args=[{"node": nodes(d).index(calls(d)[0])}]),
        ),
        "a node that is not there": lambda d: calls(d)[0].update(args=[{"node": 10**9}]),
        "a node before the first": lambda d: calls(d)[0].update(args=[{"node": -1}]),
        "a node of another kind": lambda d: calls(d)[0].update(op="call_module"),
        "a method": lambda d: calls(d)[0].update(op="call_method"),
        "an unknown operator's position": lambda d: calls(d)[0].update(call=10**6),
        "two nodes of one name": lambda d: calls(d)[1].update(name=calls(d)[0]["name"]),
        "a name that is code": lambda d: calls(d)[0].update(name="x; import os"),
        "a name that is a keyword": lambda d: calls(d)[0].update(name="lambda"),
        "a name that is a number": lambda d: calls(d)[0].update(name=3),
        "an argument that is code": lambda d: calls(d)[0].update(kwargs=[["x=__import__('os')", 1]]),
        "no output": lambda d: nodes(d).pop(),
        "two outputs": lambda d: nodes(d).append(nodes(d)[-1]),
        "no nodes": lambda d: nodes(d).clear(),
        "the nodes twice": lambda d: nodes(d).extend(nodes(d)[:-1]),
        "a placeholder less": lambda d: nodes(d).pop(0),
        "a forward without saved values": lambda d: nodes(d, "forward")[-1].update(results=[]),
        "a backward that returns less": lambda d: nodes(d, "backward")[-1].update(results=[]),
        "the halves swapped": lambda d: d["program"].update(
            forward=d["program"]["backward"], backward=d["program"]["forward"]
        ),
        "no backward": lambda d: d["program"].pop("backward"),
        "a constant that is not there": lambda d: calls(d)[0].update(op="get_attr", constant="nothing"),
        "values nested without end": lambda d: calls(d)[0].update(args=[nest(200)]),
        "an unknown kind of value": lambda d: calls(d)[0].update(args=[{"pickle": "gASV"}]),
        "two kinds of value": lambda d: calls(d)[0].update(args=[{"tuple": [], "dict": []}]),
        "a dtype that is none": lambda d: calls(d)[0].update(args=[{"dtype": "Tensor"}]),
        "a device that is none": lambda d: calls(d)[0].update(args=[{"device": "__import__('os')"}]),
        "a layout that is none": lambda d: calls(d)[0].update(args=[{"layout": "load"}]),
        "bytes that are none": lambda d: calls(d)[0].update(args=[{"bytes": "%%%"}]),
        "a dict with a list as key": lambda d: calls(d)[0].update(args=[{"dict": [[[1], 2]]}]),
        "a size of text": lambda d: calls(d)[0].update(args=[{"size": ["x"]}]),
        "a layout's position": lambda d: calls(d)[0].update(layout=10**6),
        "a line's position": lambda d: calls(d)[0].update(line=-5),
        "no tables": lambda d: d.pop("tables"),
        "no symbols": lambda d: d.pop("symbols"),
        "training is text": lambda d: d.update(training="yes"),
        "a context that is a list": lambda d: d.update(context=[1]),
        "facts about code": lambda d: d.update(facts=[[0, "__import__('os')", None, True]]),
        "facts about no input": lambda d: d.update(facts=[[99, "{}.is_leaf", None, True]]),
        "an argument that is no tensor": lambda d: [leaf.pop("tensor", None) for leaf in d["call"]["leaves"]],
        "no arguments": lambda d: d["call"].update(leaves=[]),
        "a tree of code": lambda d: d["call"]["tree"]["children"][0].update(kind="exec"),
        "a named tuple of code": lambda d: d["call"]["tree"]["children"][0].update(
            kind="namedtuple", name="A", fields=["a b", "__import__"]
        ),
        "a result type that is none": lambda d: d["call"]["tree"]["children"][0].update(kind="structseq", name="__doc__"),
        "an error of another class": lambda d: d["program"].update(backward_error={"class": "SystemExit", "text": "x"}),
    }  # fmt: skip
    for name, edit in edits.items():

        def change(data, edit=edit):
            edit(data)

        yield name, edited(content, change)
    yield from signatures(content)
    yield from sizes(content)


def nest(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def signatures(content):
    def change(key, value):
        def edit(data):
            data["program"]["signature"][key] = value

        return edit

    for key, value in [
        ("is", "Captured"), ("is", "Slot"), ("is", "os"), ("inputs", []), ("inputs", None), ("graph_outputs", []),
        ("differentiable", [99]), ("differentiable", [-1]), ("differentiable", ["0"]), ("gradients", []),
        ("runtime_views", [99]), ("rootless", [99]), ("counted_along", [99]), ("retained", [99]), ("unknown", 1),
        ("log", [{"is": "Write", "input": 99, "output": 0, "differentiable": False}]),
        ("log", [{"is": "Write", "input": 0, "output": 99, "differentiable": False}]),
        ("log", [{"is": "Effect", "input": 0}]), ("log", [{"is": "RunGraph", "input": 0}]), ("log", [{"is": "BumpVersion", "input": 99}]),
        ("log", [{"is": "TakeView", "input": 0, "path": "", "steps": [{"is": "ViewStep", "op": 3, "args": [], "kwargs": [], "index": None, "call": 0, "grad_enabled": True}]}]),
        ("log", [{"is": "InputInfo"}]), ("outputs", [{"is": "GraphOutput", "path": "out", "output": 99}]),
        ("outputs", [{"is": "OutputInfo", "path": "out"}]), ("outputs", []), ("output_spec", 3), ("output_spec", {"tree": 3}),
        ("outputs", [{"is": "AliasOutput", "path": "out", "input": 0, "output": 0, "steps": []}]),
        ("checks", [{"is": "CheckInfo", "op": "print", "args": [], "kwargs": [], "where": ""}]),
        ("decisions", [{"is": "DecisionInfo", "output": 99, "value": 1, "where": ""}]),
        ("log", [{"is": "InplaceView", "input": 0, "op": 3, "args": [], "kwargs": [], "grad_enabled": True}]),
        ("shared_memory", [[0, [0]]]), ("settings", [["grad mode", {"operator": 0}], 3]), ("generators", [{"generator": "mine"}]),
        ("tangent_specs", []), ("graph_output_specs", [{"tensor": 9999}]), ("passed", [[9, [9]]]), ("apart", [[[99], [99], "x"]]),
    ]:  # fmt: skip
        yield f"signature {key}={str(value)[:60]}", edited(content, change(key, value))


def sizes(content):
    """Symbols of sizes, in the specialization that has some."""
    expressions = [
        ["Pow", 9, ["Pow", 9, 9]], ["Pow", "s", 10**9], ["PowByNatural", 99, 16], ["eval", "1"], "nothing", [], [["Add"]], 10**30, 1.5, None,
        ["Rational", 1, 0], ["Eq", 1, 2], ["Add"] + [1] * 1000, ["FloorDiv", 1, 0], ["Mod", 5, 0], {"a": 1}, ["Lt", 3, 2],
    ]  # fmt: skip
    deep = 1
    for _ in range(500):
        deep = ["Add", 1, deep]
    for expression in [*expressions, deep]:

        def guard(data, expression=expression):
            data["symbols"]["guards"].insert(0, expression)

        yield f"the condition {str(expression)[:50]}", edited(content, guard, "programs/1.json")

        def size(data, expression=expression):
            for layout in data["tables"]["layouts"]:
                layout["shape"] = [expression if isinstance(n, str) else n for n in layout["shape"]]

        yield f"the size {str(expression)[:50]}", edited(content, size, "programs/1.json")
    for key, value in [
        ("hint", 0), ("hint", 1 << 70), ("hint", "4"), ("least", 99), ("most", 1), ("most", -1), ("kind", "float"), ("name", 3),
        ("name", "x; import os"), ("source", None), ("source", 3),
    ]:  # fmt: skip

        def symbol(data, key=key, value=value):
            data["symbols"]["symbols"][0][key] = value

        yield f"a symbol with {key}={value!r}", edited(content, symbol, "programs/1.json")


def every_kind(content):
    """All of them: what was done, and the file."""
    yield from bit_flips(content, 80)
    yield from truncations(content, 40)
    yield from others(content, 30)
    for kind in (containers, manifests, tensors, programs):
        yield from kind(content)
