"""Damaged and hostile packages: a clean error, or what was exported."""

from __future__ import annotations

import hashlib
import io
import json
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import neuron_compile
from neuron_compile import PackageError, package_file
from neuron_compile.package import verify
from neuron_compile.runtime import NeffError, NeffFile
from neuron_compile.runtime.checked import check_program
from neuron_compile.runtime.neff import contents, stablehlo_text
from neuron_compile.runtime.neff_file import pack, unpack

from .support import IGNORE_TORCH, equal

pytestmark = IGNORE_TORCH
X = torch.randn(2, 4)


class Model(nn.Module):
    """A program with weights, a constant, a mutation, a view and several containers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: torch.Tensor, more: Any, flag: bool = True) -> Any:
        self.count.add_(1)
        y = self.linear(x) + torch.tensor([1.0, 2.0, 3.0])
        return {"y": y, "views": (y.t(), x.t(), self.count), "number": 2}, more[0] * 2


ARGS = (X, [X + 1], True)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("package") / "model.neffpkg"
    torch.manual_seed(0)
    return neuron_compile.export(Model(), ARGS, path=path).read_bytes()


@pytest.fixture(scope="module")
def wanted() -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        return Model()(*ARGS)


def members(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(parts: dict[str, bytes], **options: Any) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", **options) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return stream.getvalue()


def consistent(parts: dict[str, bytes], manifest: Any) -> bytes:
    """A package whose sizes and checksums are right, whatever else is not."""
    if isinstance(manifest, dict):
        manifest = {
            **manifest,
            "parts": {
                name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                for name, data in parts.items()
                if name != "manifest.json"
            },
        }
    return zipped({**parts, "manifest.json": json.dumps(manifest).encode()})


def refused(data: bytes, folder: Path, words: str) -> None:
    path = folder / "x.neffpkg"
    path.write_bytes(data)
    with pytest.raises(PackageError, match=words):
        neuron_compile.load(path).prepare()
    assert verify(path)


def judged(data: bytes, path: Path) -> neuron_compile.Package | None:
    """A package, or ``None`` where it was refused with a clean error."""
    path.write_bytes(data)
    problems = verify(path)
    assert all(isinstance(item, str) and item for item in problems)
    try:
        package = neuron_compile.load(path)
        for entry in package._entry_points.values():
            for runner in entry.runners:
                runner.source()
    except PackageError as error:
        assert str(error)
        return None
    return package


# ---------------------------------------------------------------------------------- damage


def damaged(data: bytes, dice: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(dice.randint(1, 2)):
        place = dice.randrange(len(found) + 1)
        if (way := dice.random()) < 0.2:
            del found[place:]
        elif way < 0.7 and place < len(found):
            found[place] ^= 1 << dice.randrange(8)
        elif way < 0.85:
            found[place:place] = dice.randbytes(dice.randint(1, 40))
        else:
            del found[place : place + dice.randint(1, 40)]
    return bytes(found)


def check_damage(packed: bytes, wanted: Any, path: Path, count: int) -> None:
    dice = random.Random(count)
    # Half of the damage goes to what is not the machine code, which is most of the file.
    tail = packed[packed.rindex(b"PK\x03\x04") :]
    for trial in range(count):
        data = damaged(packed, dice)
        if trial % 2:
            data = packed[: -len(tail)] + damaged(tail, dice)
        if data == packed:
            continue
        package = judged(data, path)
        if package is not None and trial % 50 == 0:
            # Names, dates and the like in the zip's own records mean nothing to a package.
            equal(package(*ARGS), wanted)


def test_damage_is_found(packed: bytes, wanted: Any, tmp_path: Path) -> None:
    check_damage(packed, wanted, tmp_path / "x.neffpkg", 200)


@pytest.mark.slow
def test_much_damage_is_found(packed: bytes, wanted: Any, tmp_path: Path) -> None:
    check_damage(packed, wanted, tmp_path / "x.neffpkg", 5000)


# --------------------------------------------------------------------------------- hostility

VALUES: list[Any] = [
    None, True, 0, 1, -1, 7, 1 << 40, 1 << 70, 0.5, "", "x", "input", "weight", "float64",
    [], [0], [1, 2], [[]], {}, {"tensor": 0}, {"tensor": 9}, {"value": 1}, {"tuple": []},
]  # fmt: skip


def places(tree: Any) -> Any:
    keys = tree.keys() if isinstance(tree, dict) else range(len(tree))
    for key in list(keys):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from places(tree[key])


def changed(manifest: Any, dice: random.Random) -> Any:
    """A manifest with one or two values exchanged for others."""
    found = json.loads(json.dumps(manifest))
    for _ in range(dice.randint(1, 2)):
        holder, key = dice.choice(list(places(found)))
        if dice.random() < 0.8:
            holder[key] = dice.choice(VALUES)
        elif isinstance(holder, dict):
            holder.pop(key, None)
        else:
            holder.insert(key, dice.choice(VALUES))
    return found


def call_judged(package: neuron_compile.Package, folder: Path) -> None:
    """A call of a package that lies gives results, or one of these errors."""
    try:
        package(*ARGS)
    except (PackageError, neuron_compile.InputError) as error:
        assert str(error)


def check_manifests(packed: bytes, path: Path, count: int, calls: int) -> None:
    parts, dice = members(packed), random.Random(count)
    manifest, called = json.loads(parts["manifest.json"]), 0
    for _ in range(count):
        package = judged(consistent(parts, changed(manifest, dice)), path)
        if package is not None and called < calls:
            called += 1
            call_judged(package, path.parent)
    assert called == calls


def test_hostile_manifests_are_clean_errors(packed: bytes, tmp_path: Path) -> None:
    check_manifests(packed, tmp_path / "x.neffpkg", 300, 2)


@pytest.mark.slow
def test_many_hostile_manifests_are_clean_errors(packed: bytes, tmp_path: Path) -> None:
    check_manifests(packed, tmp_path / "x.neffpkg", 5000, 60)


def check_programs(packed: bytes, path: Path, count: int) -> None:
    """NEFF files with a right checksum whose signature lies."""
    parts, dice = members(packed), random.Random(count)
    manifest = json.loads(parts["manifest.json"])
    (name,) = (name for name in parts if name.startswith("programs/"))
    file = unpack(io.BytesIO(parts[name]), len(parts[name]))
    passed = 0
    for _ in range(count):
        data = pack(NeffFile(changed(file.metadata, dice), file.sections))
        passed += judged(consistent({**parts, name: data}, manifest), path) is not None
    assert passed < count


def test_hostile_programs_are_clean_errors(packed: bytes, tmp_path: Path) -> None:
    check_programs(packed, tmp_path / "x.neffpkg", 60)


@pytest.mark.slow
def test_many_hostile_programs_are_clean_errors(packed: bytes, tmp_path: Path) -> None:
    check_programs(packed, tmp_path / "x.neffpkg", 3000)


def _rename(old: str, new: str) -> Callable[[dict[str, bytes]], bytes]:
    return lambda parts: zipped({(new if n == old else n): d for n, d in parts.items()})


FILES: dict[str, tuple[Callable[[dict[str, bytes]], bytes], str]] = {
    "nothing": (lambda parts: b"", "not a zip file"),
    "text": (lambda parts: b"PK\x05\x06 or not", "no package"),
    "no manifest": (lambda parts: zipped({}), "has no manifest"),
    "path outside": (_rename("weights.safetensors", "../weights.safetensors"), "is named"),
    "absolute path": (_rename("weights.safetensors", "/tmp/x"), "is named"),
    "another member": (lambda parts: zipped({**parts, "x.pkl": b""}), "is named"),
    "missing member": (
        lambda parts: zipped({n: d for n, d in parts.items() if n != "weights.safetensors"}),
        "others than the manifest lists",
    ),
    "compressed": (lambda parts: zipped(parts, compression=zipfile.ZIP_DEFLATED), "compressed"),
    "manifest of another format": (
        lambda parts: zipped({**parts, "manifest.json": b'{"format": 2}'}),
        "reads format 1",
    ),
    "deep manifest": (lambda parts: zipped({**parts, "manifest.json": b"[" * 99999}), "deeply"),
    "manifest in latin": (lambda parts: zipped({**parts, "manifest.json": b"\xff"}), "damaged"),
    "huge number": (
        lambda parts: zipped({**parts, "manifest.json": b"9" * 5000}),
        "damaged",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_other_files_are_refused(name: str, packed: bytes, tmp_path: Path) -> None:
    make, words = FILES[name]
    refused(make(members(packed)), tmp_path, words)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_members_of_one_name_are_refused(packed: bytes, tmp_path: Path) -> None:
    stream = io.BytesIO(packed)
    with zipfile.ZipFile(stream, "a") as archive:
        archive.writestr("weights.safetensors", b"")
    refused(stream.getvalue(), tmp_path, "one name")


def test_no_size_is_believed(packed: bytes, tmp_path: Path) -> None:
    """A member that says it has a terabyte is refused before anything is allocated."""
    parts = members(packed)
    manifest = json.loads(parts["manifest.json"])
    manifest["weights"][0] |= {"shape": [1 << 30, 1 << 8], "stride": [1 << 8, 1]}
    refused(consistent(parts, manifest), tmp_path, "shape or dtype")
    header = json.dumps(
        {"linear.weight": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}
    ).encode()
    huge = len(header).to_bytes(8, "little") + header
    refused(
        consistent({**parts, "weights.safetensors": huge}, json.loads(parts["manifest.json"])),
        tmp_path,
        "others than|shape or dtype",
    )
    central = packed.rindex(b"PK\x01\x02")
    larger = bytearray(packed)
    larger[central + 20 : central + 28] = (0xFFFFFF00).to_bytes(4, "little") * 2
    refused(bytes(larger), tmp_path, "larger than the file")


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda s: s | {"linear.bias": torch.zeros(4)}, "shape or dtype"),
        (lambda s: s | {"more": torch.zeros(1)}, "others than"),
        (lambda s: {k: v for k, v in s.items() if k != "count"}, "others than"),
    ],
    ids=["shape", "more", "fewer"],
)
def test_other_tensors_are_refused(change: Any, words: str, packed: bytes, tmp_path: Path) -> None:
    parts = members(packed)
    state = change(safetensors.torch.load(parts["weights.safetensors"]))
    parts["weights.safetensors"] = safetensors.torch.save(state)
    refused(consistent(parts, json.loads(parts["manifest.json"])), tmp_path, words)


# ------------------------------------------------------------------- programs and signatures


def program(packed: bytes) -> NeffFile:
    parts = members(packed)
    (data,) = (data for name, data in parts.items() if name.startswith("programs/"))
    return unpack(io.BytesIO(data), len(data))


LIES: dict[str, tuple[Callable[[Any], None], str]] = {
    "fewer arguments": (lambda s: s["arguments"].pop(), "takes"),
    "another shape": (lambda s: s["arguments"][0].update(shape=[9, 9]), "argument 0"),
    "another dtype": (lambda s: s["arguments"][0].update(dtype="float64"), "argument 0"),
    "result that is not there": (lambda s: s["results"][1].update(index=99), "result 99"),
    "argument that is not there": (lambda s: s["results"][3].update(index=99), "argument 99"),
    "view beyond a result": (
        lambda s: (
            s["results"][2]["view"].update(shape=[1000])
            or s["results"][2]["view"].update(stride=[1])
        ),
        "beyond the memory",
    ),
    "offset beyond a result": (
        lambda s: s["results"][2]["view"].update(offset=1 << 40),
        "beyond the memory",
    ),
    "negative offset": (lambda s: s["results"][2]["view"].update(offset=-4), "beyond the memory"),
    "view beyond an argument": (
        lambda s: s["results"][3]["view"].update(offset=1 << 20),
        "beyond the memory",
    ),
    "wider elements": (lambda s: s["results"][1].update(dtype="complex128"), "elements of f32"),
    "a seed": (lambda s: s.update(seeded=True), "takes"),
    "checks": (
        lambda s: s.update(checks=[{"error": "IndexError", "message": "x"}]),
        "which check failed",
    ),
    "strides": (lambda s: s["results"][1].update(stride=[1 << 50, 1]), "stride does not fit"),
    "expand": (lambda s: s["results"][1].update(expand=[7]), "expand does not fit"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_signature_that_lies_is_refused(name: str, packed: bytes) -> None:
    lie, words = LIES[name]
    file = program(packed)
    metadata = json.loads(json.dumps(file.metadata))
    signature, _, constants = contents(file)
    check_program(stablehlo_text(file), signature, constants)
    lie(metadata["signature"])
    signature, _, constants = contents(NeffFile(metadata, file.sections))
    with pytest.raises(NeffError, match=words):
        check_program(stablehlo_text(file), signature, constants)


def test_a_program_that_calls_others_is_refused(packed: bytes) -> None:
    text = """func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
      %0 = stablehlo.custom_call @system(%x) : (tensor<2xf32>) -> tensor<2xf32>
      return %0 : tensor<2xf32>
    }"""
    signature, _, _ = contents(program(packed))
    with pytest.raises(NeffError, match="calls system, outside of itself"):
        check_program(text, signature, ())


def test_a_failed_write_leaves_the_old_package(
    packed: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.neffpkg"
    path.write_bytes(packed)

    def fail(descriptor: int) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(package_file.os, "fsync", fail)
    with pytest.raises(OSError, match="full"):
        neuron_compile.export(Model(), ARGS, path=path)
    assert path.read_bytes() == packed
    assert list(tmp_path.iterdir()) == [path]


def test_equal_models_make_equal_manifests(packed: bytes, tmp_path: Path) -> None:
    torch.manual_seed(0)
    again = neuron_compile.export(Model(), ARGS, path=tmp_path / "x").read_bytes()
    first, second = (json.loads(members(data)["manifest.json"]) for data in (packed, again))
    for manifest in (first, second):
        manifest.pop("parts")  # XLA's machine code is not the same twice
        for item in manifest["entry_points"]["forward"]["programs"]:
            item.pop("part")
    assert first == second
    assert members(packed)["weights.safetensors"] == members(again)["weights.safetensors"]
