"""``neuron-compile compile``: a script, or the model of a factory, through the backend."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import json
import operator
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .compile_pages import measured_page, script_page
from .console import UsageError, add_command, print_json

if TYPE_CHECKING:
    from ..settings import Settings

_MORE = """\
SCRIPT runs with 'neuron' as the default backend of torch.compile; what stands behind -- is its
sys.argv. Its own backend=... and options=... win. With --json what it prints goes to standard
error.

MODULE:FACTORY (a dotted name or a path of a .py file) names a function without arguments that
returns (model, args) or (model, args, kwargs). Its model is compiled for inference (eval(),
no_grad()), or with --training (train()) forward and backward of the sum of its results, compared
with eager PyTorch, and timed.

examples: neuron-compile compile train.py --option check_indices=false -- --epochs 1
          neuron-compile compile models/net.py:example --training

exit status: 0; that of the script; 1 where it raised, where nothing was compiled, or where results
differ from eager's; 2 for a wrong argument."""


def add(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands, "compile", _run, "compile a script's or a factory's model", _MORE
    )
    parser.add_argument("target", metavar="SCRIPT|MODULE:FACTORY")
    parser.add_argument("--training", action="store_true", help="forward and backward (FACTORY)")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the backend, or a flag of XLA's (xla_...); may be repeated",
    )
    parser.add_argument("--mode", help="a mode of the backend, such as strict")
    parser.add_argument(
        "--repeat", type=int, default=10, metavar="N", help="calls to time (FACTORY; 10)"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest difference over eager's largest value (FACTORY; by default, the dtype's)",
    )


def _run(options: argparse.Namespace) -> int:
    module, colon, factory = options.target.rpartition(":")
    settings = backend_options(options.option)
    if colon:
        if options.behind:
            raise UsageError("arguments behind -- are for a script, and a factory takes none")
        return _factory(module, factory, settings, options)
    if options.training:
        raise UsageError("--training needs MODULE:FACTORY; a script trains by itself")
    if not Path(options.target).is_file():
        raise UsageError(f"{options.target}: no such script, and no MODULE:FACTORY")
    return _script(options.target, settings, options)


def backend_options(given: list[str]) -> dict[str, Any]:
    """``KEY=VALUE`` pairs as ``options`` of ``torch.compile``; ``xla_…`` are flags of XLA's.

    Raises:
        UsageError: for what is no pair.
    """
    found: dict[str, Any] = {}
    flags: dict[str, Any] = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"--option {pair}: must be KEY=VALUE")
        if name.startswith("xla_") and name != "xla_options":
            flags[name] = _value(value)
        else:
            found[name] = json.loads(value) if name == "xla_options" else value
    return {**found, "xla_options": flags} if flags else found


def _value(text: str) -> Any:
    """A bool or a number, if it is one."""
    with contextlib.suppress(ValueError):
        value = json.loads(text.lower() if text.lower() in ("true", "false") else text)
        if isinstance(value, bool | int | float):
            return value
    return text


def _resolved(given: Mapping[str, Any], mode: str | None) -> Settings:
    from ..errors import SettingsError
    from ..settings import resolve

    try:
        return resolve(given, mode)
    except SettingsError as error:
        raise UsageError(str(error)) from error


# ---------------------------------------------------------------------------------- scripts


def _script(path: str, given: Mapping[str, Any], options: argparse.Namespace) -> int:
    _resolved(given, options.mode)
    from ..records import as_data, report, reset_report

    reset_report()
    out = contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext()
    with out, _default_backend(given, options.mode):
        status = _execute(path, options.behind)
    found = report()
    compiled = any(as_data(found).values())
    if options.json:
        print_json({"script": path, "status": status, "report": as_data(found)})
    else:
        script_page(found)
    if not compiled:
        print(
            f"neuron-compile: {path} compiled nothing: it never called what torch.compile "
            "returned, or names another backend",
            file=sys.stderr,
        )
        return status or 1
    return status


@contextlib.contextmanager
def _default_backend(given: Mapping[str, Any], mode: str | None) -> Iterator[None]:
    """``torch.compile`` without a backend means ours, under these options and this mode."""
    import torch

    from ..backend import neuron

    def chosen(
        module: Any,
        inputs: Any,
        *,
        options: Mapping[str, Any] | None = None,
        mode: str | None = mode,
    ) -> Callable[..., Any]:
        return neuron(module, inputs, options={**given, **(options or {})}, mode=mode)

    before = torch.compiler.get_default_backend()
    torch.compiler.set_default_backend(chosen if given or mode else "neuron")
    try:
        yield
    finally:
        torch.compiler.set_default_backend(before)


def _execute(path: str, arguments: list[str]) -> int:
    """Run a script as ``python SCRIPT`` does, and return its exit status."""
    argv, search = sys.argv, sys.path[:]
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except Exception as error:  # noqa: BLE001 - Python, too, prints it and exits with 1
        _print_from(error, path)
        return 1
    finally:
        sys.argv, sys.path[:] = argv, search
    return 0


def _print_from(error: BaseException, path: str) -> None:
    """Print a traceback from the first frame of the user's file on, as Python would."""
    frames = error.__traceback__
    while frames is not None and not _same(frames.tb_frame.f_code.co_filename, path):
        frames = frames.tb_next
    traceback.print_exception(error.with_traceback(frames or error.__traceback__))


def _same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


# -------------------------------------------------------------------------------- factories


def _factory(module: str, name: str, given: Mapping[str, Any], options: argparse.Namespace) -> int:
    if options.repeat < 1:
        raise UsageError("--repeat must be at least 1")
    settings = _resolved(given, options.mode)
    from ..errors import NeuronError
    from ..runtime import PlatformError
    from .measure import measure

    function, path = _found(module, name)
    try:
        model, args, kwargs = _parts(function(), options.target)
    except Exception as error:
        if isinstance(error, UsageError):
            raise
        _print_from(error, path)
        return 1
    try:
        measured = measure(
            model,
            args,
            kwargs,
            settings=settings,
            training=options.training,
            repeat=options.repeat,
            tolerance=options.tolerance,
        )
    except (NeuronError, PlatformError) as error:
        print(f"neuron-compile: {error}", file=sys.stderr)
        return 1
    if options.json:
        print_json({"target": options.target, **measured.data()})
    else:
        measured_page(options.target, measured)
    return 0 if measured.good else 1


def _found(module: str, name: str) -> tuple[Callable[[], Any], str]:
    """The factory, and the file that it stands in."""
    loaded = _from_file(Path(module)) if module.endswith(".py") else _from_name(module)
    try:
        function = operator.attrgetter(name)(loaded)
    except AttributeError as error:
        known = [key for key, value in vars(loaded).items() if callable(value) and key[0] != "_"]
        raise UsageError(f"{module} has no {name!r}; it has {', '.join(known)}") from error
    if not callable(function):
        raise UsageError(f"{module}:{name} is no function")
    return function, loaded.__file__ or ""


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file")
    # Dynamo finds a function's module by its name, which another module may have already.
    name = path.stem if path.stem not in sys.modules else f"neuron_compile_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path}: Python cannot import it")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(loaded)
    return loaded


def _from_name(name: str) -> ModuleType:
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(f"there is no module {name!r}, here or installed") from error
        raise


def _parts(made: Any, target: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    wanted = f"{target} must return (model, args) or (model, args, kwargs)"
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise UsageError(f"{wanted}, not {type(made).__name__}")
    model, args = made[:2]
    kwargs = made[2] if len(made) == 3 else {}
    if not callable(model) or not isinstance(kwargs, Mapping):
        raise UsageError(f"{wanted}: a callable, a tuple and a dict")
    if dataclasses.is_dataclass(args) or not isinstance(args, tuple | list):
        args = (args,)
    return model, tuple(args), dict(kwargs)
