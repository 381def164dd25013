"""SGLang's own parser and request types on a machine without a GPU, and the record of them that the fast tests use.

    python -m tests.unit.sglang.sglang_source            writes sglang_0_5_23.json beside this file

The package and what it needs to be imported are installed into a folder of their own (K31_SGLANG_SITE, by default
`.k31/sglang-0.5.23`), never into the project's environment. It takes about 150 MB and a minute.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

VERSION = "0.5.23"
RECORD = Path(__file__).with_name("sglang_0_5_23.json")
SITE = Path(os.environ.get("K31_SGLANG_SITE", Path(__file__).parents[3] / ".k31" / f"sglang-{VERSION}"))
NEEDS = (
    f"sglang=={VERSION}",
    "pybase64==1.5.1",
    "msgspec==0.23.0",
    "pyzmq==27.3.0",
    "apache-tvm-ffi==0.1.11",
    "sentencepiece==0.2.1",
    "gguf==0.19.0",
    "openai==2.8.0",
    "partial-json-parser==0.2.1.1.post7",
    "ipython==9.18.1",
    "traitlets==5.16.1",
    "decorator==5.3.1",
    "setproctitle==1.3.8",
    "python-multipart==0.0.34",
)
REQUEST_TYPES = (
    "GenerateReqInput",
    "AbortReq",
    "LoadLoRAAdapterReqInput",
    "LoadLoRAAdapterFromTensorsReqInput",
    "UnloadLoRAAdapterReqInput",
    "ReleaseMemoryOccupationReqInput",
    "ResumeMemoryOccupationReqInput",
    "UpdateWeightVersionReqInput",
    "UpdateWeightsFromTensorReqInput",
    "BeginWeightUpdateReqInput",
    "EndWeightUpdateReqInput",
    "UpdateWeightsFromDistributedReqInput",
    "InitWeightsUpdateGroupReqInput",
)


def install() -> Path:
    """Install into SITE unless it is there; returns it."""
    if not (SITE / "sglang" / "srt").is_dir():
        SITE.parent.mkdir(parents=True, exist_ok=True)
        command = ["uv", "pip", "install", "-q", "--python", sys.executable, "--target", str(SITE), "--no-deps", *NEEDS]
        subprocess.run(command, check=True, timeout=600)
    return SITE


def in_sglang(code: str) -> Any:
    """Run `code` in a process that can import SGLang; it prints JSON, which is returned."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(install()), str(Path(__file__).parents[3])]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", f"from tests.unit.sglang import sglang_source as S; S.without_torchvision(); {code}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"SGLang's process failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def without_torchvision() -> None:
    """SGLang imports torchvision for images; its wheels need CUDA. Empty modules take its place in this process."""
    import importlib.machinery
    import types

    import transformers.utils.import_utils as known

    known.is_torchvision_available()  # remembered as absent before the stand-ins exist

    class Empty(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    for name in (
        "",
        ".transforms",
        ".transforms.functional",
        ".transforms.v2",
        ".transforms.v2.functional",
        ".io",
        ".ops",
    ):
        module = Empty(f"torchvision{name}")
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None, is_package=True)
        sys.modules[module.__name__] = module


def parser() -> Any:
    """SGLang's own argument parser (inside `in_sglang`)."""
    import argparse

    from sglang.srt.server_args import ServerArgs

    made = argparse.ArgumentParser("sglang", exit_on_error=False)
    ServerArgs.add_cli_args(made)
    return made


def record() -> dict[str, Any]:
    """What this version accepts: every option with its kind and choices, request fields, routes."""
    site = install()
    text = (site / "sglang" / "srt" / "entrypoints" / "http_server.py").read_text()
    routes = sorted(set(re.findall(r"@app\.(?:get|post|api_route)\(\s*\"(/[a-z_]+)\"", text)))
    return {"version": VERSION, "routes": routes, **in_sglang("S.print_described()")}


def print_described() -> None:
    """Inside `in_sglang`: options and request types as JSON."""
    from sglang.srt.managers import io_struct

    options = {}
    for action in parser()._actions:
        for option in action.option_strings:
            if option.startswith("--"):
                choices = sorted(map(str, action.choices)) if action.choices else None
                options[option] = {"dest": action.dest, "takes_value": action.nargs != 0, "choices": choices}
    requests = {}
    for name in REQUEST_TYPES:
        kind = getattr(io_struct, name)
        fields = (
            [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else kind.__struct_fields__
        )
        requests[name] = sorted(fields)
    print(json.dumps({"options": options, "requests": requests}))


def one_line_each(tree: dict[str, Any]) -> str:
    """JSON with one line an option or request type, so that a change can be reviewed."""
    blocks = []
    for key, value in sorted(tree.items()):
        if isinstance(value, dict):
            lines = [f"  {json.dumps(k)}: {json.dumps(v, sort_keys=True)}" for k, v in sorted(value.items())]
            blocks.append(f" {json.dumps(key)}: {{\n" + ",\n".join(lines) + "\n }")
        else:
            blocks.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


if __name__ == "__main__":
    RECORD.write_text(one_line_each(record()))
    print(f"wrote {RECORD.name}")
