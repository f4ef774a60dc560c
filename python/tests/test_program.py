"""`python -m nanovllm` is the program, and the types of the package hold."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import urllib.request

import pytest
from conftest import DEMO, PROGRAM, SOURCE


def test_the_module_is_the_program():
    ours = subprocess.run(
        [sys.executable, "-m", "nanovllm", "--version"], capture_output=True, text=True, check=True
    )
    theirs = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, check=True)
    assert ours.stdout == theirs.stdout
    code = subprocess.run([sys.executable, "-m", "nanovllm", "nonsense"], capture_output=True)
    assert code.returncode == 2


def test_the_module_serves():
    command = [sys.executable, "-m", "nanovllm", "serve", DEMO, "--device", "cpu", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        address = None
        for line in server.stderr:
            if found := re.search(r"listening on (http://\S+);", line):
                address = found[1]
            if "serving" in line:
                break
        with urllib.request.urlopen(address + "/v1/models") as answer:
            assert json.load(answer)["data"][0]["id"] == DEMO
        server.send_signal(signal.SIGTERM)
        assert server.wait(120) == 0


def test_the_types_hold_in_strict_mode():
    mypy = pytest.importorskip("mypy.api")
    text, errors, status = mypy.run(
        ["--config-file", str(SOURCE / "pyproject.toml"), "--cache-dir", os.devnull,
         str(SOURCE / "python/nanovllm"), str(SOURCE / "python/tests/typed_program.py")]
    )
    assert status == 0, text + errors


def scripts():
    """nano-vLLM's own, from a checkout of its repository; not part of this one."""
    place = os.environ.get("NANO_VLLM_CHECKOUT")
    return pathlib.Path(place) if place else None


@pytest.mark.skipif(scripts() is None, reason="NANO_VLLM_CHECKOUT names no checkout of nano-vLLM")
@pytest.mark.parametrize("script", ["example.py", "bench.py"])
def test_nano_vllms_scripts_run_unchanged(script, tmp_path):
    # They name the model's place below the home directory: HOME leads there.
    model = tmp_path / "huggingface/Qwen3-0.6B"
    model.parent.mkdir()
    model.symlink_to(os.environ["NANO_VLLM_MODEL"] if script == "bench.py" else DEMO)
    copy = tmp_path / script
    copy.write_text((scripts() / script).read_text())
    done = subprocess.run(
        [sys.executable, str(copy)],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Completion: " in done.stdout or "Throughput: " in done.stdout


VLLM_EXAMPLES = [
    "basic/offline_inference/basic.py",
    "features/structured_outputs/structured_outputs_offline.py",
]


@pytest.mark.skipif("VLLM_EXAMPLES" not in os.environ, reason="VLLM_EXAMPLES names no folder")
@pytest.mark.parametrize("script", VLLM_EXAMPLES)
def test_vllms_examples_run_with_the_package_replaced(script, tmp_path):
    """VLLM_EXAMPLES is the folder `examples` of a checkout of vLLM; not part of this repository."""
    text = (pathlib.Path(os.environ["VLLM_EXAMPLES"]) / script).read_text()
    text = re.sub(r"\bfrom vllm\b", "from nanovllm", text)
    text, models = re.subn(r'model="[\w-]+/[\w.-]+"', f'model="{DEMO}"', text)
    assert models == 1
    copy = tmp_path / "script.py"
    copy.write_text(text)
    done = subprocess.run([sys.executable, str(copy)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if "basic" in script:
        assert done.stdout.count("Output:    '") == 4
    else:
        assert re.search(r"Choice: (Positive|Negative)$", done.stdout, re.M)
        assert re.search(r"Grammar: SELECT col_[12]  from table_[12]  where col_", done.stdout)
