"""Caches across processes: warm starts, artifacts, processes that start together, killed ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .support import in_fresh_interpreter

#: A warm process may call neither compiler.
NO_COMPILERS = """
    from neuron_compile.lowering import torch_mlir
    from neuron_compile.runtime import pjrt
    def refuse(*args, **kwargs):
        raise AssertionError("a compiler was called")
    torch_mlir.lower_to_stablehlo = pjrt.compile_module = refuse
"""
MODEL = """
    import torch, neuron_compile
    from torch._dynamo.utils import counters
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(4 * 36, 8), torch.nn.LayerNorm(8), torch.nn.GELU(),
    )
    x = torch.randn(2, 3, 8, 8)
    wanted = model(x)
    model(x).square().sum().backward()
    gradient, model[0].weight.grad = model[0].weight.grad, None
    run = torch.compile(model, backend="neuron")
    found = run(x)
    torch.testing.assert_close(found, wanted)
    run(x).square().sum().backward()
    torch.testing.assert_close(model[0].weight.grad, gradient, rtol=1e-4, atol=1e-4)
    report, aot = neuron_compile.report(), counters["aot_autograd"]
    print(report.compilations, report.cache_hits, aot["autograd_cache_hit"])
"""


def environment(folder: Path) -> dict[str, str]:
    """Caches of a test's own."""
    return {
        "NEURON_COMPILE_CACHE": "1",
        "NEURON_COMPILE_CACHE_DIR": str(folder / "neff"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),
    }


def test_a_second_process_calls_no_compiler_and_artifacts_carry_it_elsewhere(
    tmp_path: Path,
) -> None:
    bundle = tmp_path / "bundle"
    save = f"""
    data, info = torch.compiler.save_cache_artifacts()
    assert len(info.artifacts["neuron_neff"]) == 2, info
    open({str(bundle)!r}, "wb").write(data)
    """
    load = f"""
    import torch
    torch.compiler.load_cache_artifacts(open({str(bundle)!r}, "rb").read())
    """
    here, there = environment(tmp_path / "here"), environment(tmp_path / "there")
    cold = in_fresh_interpreter(MODEL, here)
    assert cold.stdout.split() == ["2", "0", "0"]
    warm = in_fresh_interpreter(NO_COMPILERS + MODEL + save, here)
    assert warm.stdout.split() == ["0", "2", "1"]
    in_fresh_interpreter(load, there)
    elsewhere = in_fresh_interpreter(NO_COMPILERS + MODEL, there)
    assert elsewhere.stdout.split() == ["0", "2", "1"]


@pytest.mark.slow
def test_precompiled_code_needs_no_tracing(tmp_path: Path) -> None:
    """PyTorch's experimental precompilation takes our graphs along."""
    bundle = tmp_path / "bundle"
    precompile = """
    import torch
    torch._dynamo.config.caching_precompile = True
    """
    save = f"""
    open({str(bundle)!r}, "wb").write(torch.compiler.save_cache_artifacts()[0])
    """
    load = f"""
    torch.compiler.load_cache_artifacts(open({str(bundle)!r}, "rb").read())
    """
    model = """
    import copy, neuron_compile
    from torch._dynamo.utils import counters
    torch.manual_seed(0)
    eager = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    model, x = copy.deepcopy(eager), torch.randn(3, 4)
    run = torch.compile(model, backend="neuron")
    for module, call in ((eager, eager), (model, run)):
        call(x).square().sum().backward()
    torch.testing.assert_close(run(x), eager(x))
    torch.testing.assert_close(model[0].weight.grad, eager[0].weight.grad)
    report = neuron_compile.report()
    print(report.compilations, report.cache_hits, counters["frames"]["total"])
    """
    in_fresh_interpreter(precompile + model + save, environment(tmp_path / "here"))
    there = environment(tmp_path / "there")
    found = in_fresh_interpreter(precompile + load + NO_COMPILERS + model, there)
    assert found.stdout.split() == ["0", "2", "0"]


@pytest.mark.slow
def test_artifacts_are_used_whatever_folder_an_option_names(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    save = f"""
    open({str(bundle)!r}, "wb").write(torch.compiler.save_cache_artifacts()[0])
    """
    load = f"""
    import torch
    torch.compiler.load_cache_artifacts(open({str(bundle)!r}, "rb").read())
    """
    in_fresh_interpreter(MODEL + save, environment(tmp_path / "here"))
    folder = str(tmp_path / "option")
    model = MODEL.replace('"neuron")', f'"neuron", options={{"cache_dir": {folder!r}}})')
    found = in_fresh_interpreter(load + NO_COMPILERS + model, environment(tmp_path / "there"))
    assert found.stdout.split() == ["0", "2", "1"]


def test_lines_of_a_cached_graph_are_those_of_the_file_as_it_is(tmp_path: Path) -> None:
    """The graphs in the cache were made when the user's file had other line numbers."""
    script = tmp_path / "script.py"
    text = (
        "import torch, neuron_compile\n"
        "def function(x, i):\n"
        "    return x[i] * 2\n"
        "run = torch.compile(function, backend='neuron')\n"
        "run(torch.ones(3), torch.tensor([2]))\n"
        "try:\n"
        "    run(torch.ones(3), torch.tensor([3]))\n"
        "except IndexError as error:\n"
        "    print(error)\n"
        "print(neuron_compile.report().compilations)\n"
    )
    run = f"import runpy; runpy.run_path({str(script)!r})"
    for blank, compilations in ((0, "1"), (2, "0")):
        script.write_text("\n" * blank + text)
        result = in_fresh_interpreter(run, environment(tmp_path))
        assert f"script.py:{3 + blank} in function" in result.stdout
        assert result.stdout.split()[-1] == compilations


@pytest.mark.slow
def test_processes_that_start_together_compile_each_graph_once(tmp_path: Path) -> None:
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH", "NEURON"))}
    program = "\n".join(line[4:] for line in MODEL.splitlines())
    command = [sys.executable, "-c", program]
    processes = [
        subprocess.Popen(
            command,
            env={**variables, **environment(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    outputs = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, outputs
    numbers = [list(map(int, out.split())) for out, _ in outputs]
    assert sum(compilations for compilations, _, _ in numbers) == 2
    assert sum(hits for _, hits, _ in numbers) == 14


@pytest.mark.parametrize("trials", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_killed_writers_and_damage_never_give_wrong_entries(trials: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.cache_trials", str(tmp_path), "--trials", str(trials)]
    folder = Path(__file__).parents[1]
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{trials} trials, 0 problems" in result.stdout


def test_a_graph_with_effects_finds_its_executable_in_a_second_process(tmp_path: Path) -> None:
    """PyTorch's cache would give it back without the tokens that its checks take."""
    program = """
    import torch, neuron_compile
    a = torch.tensor([[4.0, 1.0], [1.0, 3.0]])
    run = torch.compile(torch.linalg.cholesky, backend="neuron")
    torch.testing.assert_close(run(a), torch.linalg.cholesky(a))
    report = neuron_compile.report()
    print(report.compilations, report.cache_hits)
    """
    for wanted in (["1", "0"], ["0", "1"]):
        assert in_fresh_interpreter(program, environment(tmp_path)).stdout.split() == wanted


def test_a_warm_start_does_not_import_torch_mlir(tmp_path: Path) -> None:
    imported = """
    import sys
    print(*(name for name in ("torch_mlir",) if name in sys.modules))
    """
    cold = in_fresh_interpreter(MODEL + imported, environment(tmp_path))
    assert cold.stdout.split() == ["2", "0", "0", "torch_mlir"]
    warm = in_fresh_interpreter(MODEL + imported, environment(tmp_path))
    assert warm.stdout.split() == ["0", "2", "1"]
    assert not warm.stderr, "jaxlib logs less once jax has set how much"
