"""NEFF files: what is saved runs again, and a damaged or hostile file is a clean error."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from neuron_compile.__main__ import main
from neuron_compile.runtime import Executor, NeffError, NeffFile, contents, load, neff, neff_file

from .support import equal, neuron

WEIGHT = torch.randn(5, 8)

# Each: a function without mutations, and its arguments.
GRAPHS: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "linear": (lambda x: torch.nn.functional.linear(x, WEIGHT).relu(), [torch.randn(3, 8)]),
    "vendor kernel": (
        lambda x, w: torch.nn.functional.conv2d(x, w).tanh(),
        [torch.randn(2, 3, 9, 9), torch.randn(4, 3, 3, 3)],
    ),
    "transposed results": (lambda x: ((x * 2).t(), (x + 1).expand(2, 3, 8)), [torch.randn(3, 8)]),
    "shared memory": (lambda x: ((y := x * 2), y[1:], y.t()), [torch.randn(3, 8)]),
    "indices": (lambda x, i: x[i] + 1, [torch.randn(3, 8), torch.tensor([2, 0])]),
    "constants": (
        lambda x: (x + torch.arange(8) * torch.tensor([1.5, 2.0])[1], torch.tensor([7])),
        [torch.randn(3, 8)],
    ),
    "uint16": (lambda x: x.to(torch.uint16), [torch.arange(6)]),
    "complex": (lambda x: torch.view_as_complex(x.view(3, 4, 2)) * 2j, [torch.randn(3, 8)]),
    "no results": (lambda x: None, [torch.randn(3)]),
}


def saved(function: Callable[..., Any], args: list[torch.Tensor], folder: Path) -> Path | None:
    """The file of a function's graph; ``None`` if there is nothing to compute."""
    neuron(function, fullgraph=True, options={"dump_dir": folder})(*args)
    files = sorted(folder.glob("*.neff"))
    return files[-1] if files else None


@pytest.mark.parametrize("trust", [True, False], ids=["trusted", "rebuilt"])
@pytest.mark.parametrize("name", GRAPHS)
def test_a_saved_graph_runs_again(name: str, trust: bool, tmp_path: Path) -> None:
    function, args = GRAPHS[name]
    path = saved(function, args, tmp_path)
    if path is None:
        assert function(*args) is None
        return
    loaded = load(path, trust=trust)
    assert (loaded.rebuilt is None) == trust
    # The placeholders of an inference graph are the tensors that it uses, in some order.
    free = {"WEIGHT": WEIGHT}
    pool = [*args, *free.values()]
    taken = [
        next(x for x in pool if x.shape == spec.shape and x.dtype is spec.dtype)
        for spec in loaded.signature.arguments
    ]
    results = Executor(loaded.neff, loaded.signature, loaded.constants)(taken)
    wanted = function(*args)
    wanted = list(wanted) if isinstance(wanted, tuple) else [wanted]
    equal(results[: len(wanted)], wanted)


def test_checks_are_kept(tmp_path: Path) -> None:
    function, args = GRAPHS["indices"]
    path = saved(function, args, tmp_path)
    assert path is not None
    loaded = load(path)
    run = Executor(loaded.neff, loaded.signature, loaded.constants)
    with pytest.raises(IndexError, match="out of range"):
        run([args[0], torch.tensor([3, 0])])


@pytest.mark.parametrize("what", ["versions", "machine"])
def test_another_version_or_machine_compiles_again(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, args = GRAPHS["linear"]
    path = saved(function, args, tmp_path)
    assert path is not None
    other = (("jaxlib", "0.0"),) if what == "versions" else "another"
    monkeypatch.setattr(neff, what, lambda: other)
    assert what in (load(path, trust=True).rebuilt or "")


def test_machine_code_of_nonsense_is_compiled_again(tmp_path: Path) -> None:
    function, args = GRAPHS["linear"]
    path = saved(function, args, tmp_path)
    assert path is not None
    file = neff_file.read(path)
    broken = NeffFile(file.metadata, {**file.sections, "executable": b"nonsense"})
    neff_file.write(path, broken)
    assert "refused the executable" in (load(path, trust=True).rebuilt or "")


# ------------------------------------------------------------------------------ damaged files


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a file with all kinds of fields."""
    folder = tmp_path_factory.mktemp("neff")

    def function(x: torch.Tensor, i: torch.Tensor) -> Any:
        y = x.t()[i] * torch.tensor([1.0, 2.0, 3.0])
        return y, y[1:], y.to(torch.uint16).t()

    path = saved(function, [torch.rand(3, 8), torch.tensor([2, 0])], folder)
    assert path is not None
    return path.read_bytes()


def unpack(data: bytes) -> NeffFile:
    return neff_file.unpack(io.BytesIO(data), len(data))


def judged(data: bytes, whole: bytes) -> None:
    """A clean error, or what was saved."""
    try:
        file = unpack(data)
        found = contents(file)
    except NeffError as error:
        assert str(error)
        return
    wanted = unpack(whole)
    assert file.sections == wanted.sections
    assert file.metadata == wanted.metadata or found is not None


FUZZ = hypothesis.settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
MUCH = hypothesis.settings(FUZZ, max_examples=5000)


def check_damage(data: st.DataObject, packed: bytes) -> None:
    """Cut, flip, insert and delete."""
    damaged = bytearray(packed)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, max(len(damaged) - 1, 0)))
        way = data.draw(st.sampled_from(("cut", "flip", "insert", "delete")))
        if way == "cut":
            del damaged[place:]
        elif way == "flip" and damaged:
            damaged[place] ^= 1 << data.draw(st.integers(0, 7))
        elif way == "insert":
            damaged[place:place] = data.draw(st.binary(max_size=40))
        else:
            del damaged[place : place + data.draw(st.integers(1, 40))]
    if bytes(damaged) == packed:
        return
    with pytest.raises(NeffError):
        unpack(bytes(damaged))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=5,
)


def check_hostile_header(data: st.DataObject, packed: bytes) -> None:
    """A header that says something else, with a checksum that is right."""
    length = int.from_bytes(packed[12:16], "little")
    header = json.loads(packed[48 : 48 + length])
    places = list(_places(header))
    for _ in range(data.draw(st.integers(1, 2))):
        holder, key = data.draw(st.sampled_from(places))
        if data.draw(st.booleans()) or not isinstance(holder, dict):
            holder[key] = data.draw(JSON)
        else:
            holder.pop(key, None)
    text = json.dumps(header).encode()
    prefix = neff_file._PREFIX.pack(
        neff_file.MAGIC, neff_file.VERSION, len(text), neff_file.hashlib.sha256(text).digest()
    )
    judged(prefix + text + packed[48 + length :], packed)


def _places(tree: Any) -> Any:
    keys = tree.keys() if isinstance(tree, dict) else range(len(tree))
    for key in list(keys):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from _places(tree[key])


@FUZZ
@hypothesis.given(data=st.data())
def test_damage_is_found(data: st.DataObject, packed: bytes) -> None:
    check_damage(data, packed)


@FUZZ
@hypothesis.given(data=st.data())
def test_a_hostile_header_is_a_clean_error(data: st.DataObject, packed: bytes) -> None:
    check_hostile_header(data, packed)


@FUZZ
@hypothesis.given(data=st.binary(max_size=200))
def test_other_files_are_refused(data: bytes) -> None:
    for text in (data, neff_file.MAGIC + data):
        with pytest.raises(NeffError):
            unpack(text)


@pytest.mark.slow
@MUCH
@hypothesis.given(data=st.data())
def test_much_damage_is_found(data: st.DataObject, packed: bytes) -> None:
    check_damage(data, packed)


@pytest.mark.slow
@MUCH
@hypothesis.given(data=st.data())
def test_many_hostile_headers_are_clean_errors(data: st.DataObject, packed: bytes) -> None:
    check_hostile_header(data, packed)


@pytest.mark.parametrize(
    "metadata, sections",
    [({"a": object()}, {}), ({"a": float("nan")}, {}), ({}, {"../x": b""}), ({}, {"": b""})],
    ids=["object", "nan", "path", "empty"],
)
def test_what_cannot_be_written_is_refused(metadata: Any, sections: Any, tmp_path: Path) -> None:
    with pytest.raises(NeffError):
        neff_file.write(tmp_path / "x.neff", NeffFile(metadata, sections))
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.neff"
    neff_file.write(path, NeffFile({"a": 1}, {"b": b"2"}))

    def fail(descriptor: int) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(neff_file.os, "fsync", fail)
    with pytest.raises(OSError, match="full"):
        neff_file.write(path, NeffFile({"a": 2}, {}))
    assert neff_file.read(path) == NeffFile({"a": 1}, {"b": b"2"})
    assert [file.name for file in tmp_path.iterdir()] == ["x.neff"]


# ------------------------------------------------------------------------------- command line


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    function, args = GRAPHS["indices"]
    path = saved(function, args, tmp_path)
    assert main(["inspect", str(path)]) == 0
    page = capsys.readouterr().out
    for said in ("stablehlo", "executable", "int64", "[2]", "IndexError", "jaxlib"):
        assert said in page
    assert main(["inspect", str(path), "--stablehlo"]) == 0
    assert "func.func @main" in capsys.readouterr().out
    assert main(["inspect", str(path), "--hlo"]) == 0
    assert "HloModule" in capsys.readouterr().out
    assert main(["inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["signature"]["checks"][0]["error"] == "IndexError"


def test_inspect_refuses_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.neff"
    path.write_text("text" * 50)
    assert main(["inspect", str(path)]) == 2
    assert "no NEFF file" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "none.neff")]) == 2
