"""Run the exported sentence encoder in a fresh environment without Torch-MLIR.

``python tools/package_elsewhere.py [FOLDER]`` exports the pretrained MiniLM of ``make demo`` with
eager PyTorch's results beside it, makes a virtual environment with this package, torch, jax, numpy
and safetensors alone, and compares there what the package computes. It prints figures, and fails
where results differ by more than 1e-5. The folder is kept, so that a second run is fast.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

ELSEWHERE = """
import importlib.util, json, sys, time
folder, trust = sys.argv[1], sys.argv[2] == "trust"
for name in ("torch_mlir", "transformers"):
    assert importlib.util.find_spec(name) is None, f"{name} is installed here"
started = time.perf_counter()
import torch
import neuron_compile
imported = time.perf_counter()
package = neuron_compile.load(f"{folder}/minilm.neffpkg", trust=trust)
loaded = time.perf_counter()
calls = torch.load(f"{folder}/calls.pt")
began = time.perf_counter()
found = [package(*args) for args, _ in calls[:1]]
first = time.perf_counter() - began
found += [package(*args) for args, _ in calls[1:]]
steady = []
for _ in range(10):
    began = time.perf_counter()
    package(*calls[0][0])
    steady.append(time.perf_counter() - began)
unwanted = ("torch._dynamo", "neuron_compile.lowering")
assert not any(name.startswith(unwanted) for name in sys.modules)
difference = max(float((mine - wanted).abs().max()) for mine, (_, wanted) in zip(found, calls))
print(json.dumps({
    "rebuilt": package.rebuilt()["forward"],
    "import_s": round(imported - started, 2),
    "load_s": round(loaded - imported, 3),
    "first_call_s": round(first, 3),
    "steady_call_s": round(sorted(steady)[5], 4),
    "largest_difference": difference,
}))
assert difference < 1e-5
"""


def main() -> int:
    """Run the whole check; returns the exit status."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="neuron-package-"))
    folder.mkdir(parents=True, exist_ok=True)
    _export(folder)
    python = _environment(folder / "venv")
    (folder / "elsewhere.py").write_text(ELSEWHERE)
    for trust in ("trust", "rebuild"):
        command = [str(python), "-W", "error", "elsewhere.py", str(folder), trust]
        print(f"{trust}: ", end="", flush=True)
        if subprocess.run(command, cwd=folder, check=False).returncode:
            return 1
    return 0


def _export(folder: Path) -> None:
    sys.path.insert(0, str(ROOT))
    import torch

    import neuron_compile
    from examples.corpus import load_sentences
    from examples.embeddings import BATCH_SIZE, load_model, tokenize
    from neuron_compile.package import verify

    tokenizer, encoder = load_model()
    batches = tokenize(tokenizer, load_sentences(3 * BATCH_SIZE))
    calls = [(batch.input_ids, batch.attention_mask) for batch in batches]
    with torch.no_grad():
        torch.save([(args, encoder(*args)) for args in calls], folder / "calls.pt")
    started = time.perf_counter()
    path = neuron_compile.export(encoder, calls[0], path=folder / "minilm.neffpkg")
    seconds = time.perf_counter() - started
    problems = verify(path)
    assert not problems, problems
    weights = sum(tensor.nbytes for tensor in encoder.state_dict().values())
    print(
        f"export: {seconds:.1f} s, {path.stat().st_size / 1e6:.1f} MB, "
        f"of which {weights / 1e6:.1f} MB in the model's state dict"
    )


def _environment(folder: Path) -> Path:
    """The interpreter of an environment without Torch-MLIR."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--quiet",
        "-c",
        str(ROOT / "constraints.txt"),
    ]
    subprocess.run([*pip, "torch", "jax", "jaxlib", "numpy", "safetensors"], check=True)
    subprocess.run([*pip, "--no-deps", "--force-reinstall", str(ROOT)], check=True)
    return python


if __name__ == "__main__":
    sys.exit(main())
