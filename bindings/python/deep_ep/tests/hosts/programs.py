"""The programs that fetch.py has unpacked, unchanged, in processes on a CPU: what they lack there has a stand-in.

docs/deep-ep-hosts.md lists all of it, and test_list.py compares.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import world

#: Packages that a program imports and no dispatcher calls: empty stand-ins are imported in their places.
STAND_INS = {
    "sglang": "IPython PIL aiohttp compressed_tensors einops gguf huggingface_hub orjson pybase64 regex safetensors "
    "sentencepiece starlette torchvision tqdm transformers tvm_ffi zmq",
    "torchtitan": "spmd_types tyro",
    "vllm": "PIL aiohttp cachetools cbor2 cloudpickle cpuinfo einops fastapi huggingface_hub llguidance openai openai_harmony "
    "partial_json_parser prometheus_client pybase64 regex safetensors tqdm transformers uvloop xgrammar yaml zmq",
}

VLLM = "vllm.model_executor.layers.fused_moe"
SGLANG = "sglang.srt.layers.moe"

#: Names in a program or in torch that are replaced, and what that leaves out.
REPLACED = {
    "sglang": {
        "torch.cuda.get_device_properties": "the number of multiprocessors of a GPU",
        "sglang.srt.layers.deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM": "that DeepGEMM is there",
        f"{SGLANG}.utils.get_server_args": "the arguments of the server: there are none",
        f"{SGLANG}.token_dispatcher.deepep.sglang_per_token_group_quant_fp8": "the kernel that makes tokens float8",
        f"{SGLANG}.token_dispatcher.deepep_v2.sglang_per_token_group_quant_fp8": "the kernel that makes tokens float8",
        f"{SGLANG}.token_dispatcher.deepep_v2._get_allow_hybrid_mode": "whether the server has several hosts",
        f"{SGLANG}.token_dispatcher.deepep_v2.get_deepep_v2_fp8_scale_format": "the format of scales that a GPU wants",
        f"{SGLANG}.token_dispatcher.deepep_v2.get_parallel": "the sizes of the server's groups",
    },
    "torchtitan": {
        "deepep::dispatch": "registered for tensors on the CPU, too",
        "deepep::combine": "registered for tensors on the CPU, too",
    },
    "vllm": {
        "vllm.distributed.parallel_state.get_dp_group": "the ranks that a model's configuration would name",
        "vllm.distributed.parallel_state.get_tp_group": "the ranks that a model's configuration would name",
        "vllm.distributed.device_communicators.all2all.get_current_vllm_config": "a model's configuration",
        "vllm.distributed.device_communicators.all2all.has_deep_ep_v2": "the check of NCCL's version",
        "DeepEPV2All2AllManager._gin_checked": "the check of GIN, which asks a GPU",
        f"{VLLM}.modular_kernel.PIN_MEMORY": "pinned memory",
        f"{VLLM}.prepare_finalize.deepep_ht.moe_kernel_quantize_input": "the kernel that makes tokens float8",
        f"{VLLM}.prepare_finalize.deepep_v2.moe_kernel_quantize_input": "the kernel that makes tokens float8",
        "DeepEPV2PrepareAndFinalize.defer_globalize": "the Triton kernel that numbers experts anew",
    },
}


def table(program: str) -> list[str]:
    """What is replaced in a program, as lines of a table."""
    return [f"| `{name}` | {what} |" for name, what in REPLACED[program].items()]


def folder() -> Path | None:
    """Where fetch.py has put the programs. Their tests run only where a command says so."""
    said = os.environ.get("SWITCHYARD_HOSTS")
    return Path(said) if said else None


class Name(type):
    """A class of a stand-in: a base, a decorator, a mapping, and whatever is asked of it is another one."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return named(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.__bases__ == (Anything,):
            return decorated(args, kwargs) or super().__call__()
        return super().__call__(*args, **kwargs)

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __setitem__(cls, key: Any, value: Any) -> None:
        pass

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __or__


def decorated(args: Any, kwargs: Any) -> Any:
    """What a stand-in was called to decorate, if it was."""
    return args[0] if len(args) == 1 and not kwargs and isinstance(args[0], (type, types.FunctionType)) else None


class Anything(metaclass=Name):
    """An instance of a stand-in's class."""

    __class_validators__ = ()  # which SGLang reads of transformers

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __init_subclass__(cls, **_: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return decorated(args, kwargs) or self

    def __getattr__(self, name: str) -> Any:
        return getattr(type(self), name)

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, __: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()


def named(name: str) -> Any:
    return Name(name, (Anything,), {})


class StandIn(types.ModuleType):
    """A package, or a module of one."""

    __path__: list[str] = []  # noqa: RUF012
    __version__ = "99"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        setattr(self, name, named(name))
        return getattr(self, name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins where nothing else finds a package."""

    def __init__(self, packages: list[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self.packages else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def use(program: str) -> None:
    """Have this process import a program from its folder, and no other one."""
    at = folder()
    if at is None or not (at / program / program).is_dir():
        raise FileNotFoundError(f"{program} is not in {at}: make deep-ep-hosts fetches it")
    sys.path[:0] = [str(at / program), str(at / "imports")]
    sys.meta_path.append(Finder(STAND_INS[program].split()))


def sglang(rank: int, size: int, store: str) -> None:
    use("sglang")
    world.gloo(rank, size, store)


def torchtitan(rank: int, size: int, store: str) -> None:
    use("torchtitan")
    world.gloo(rank, size, store)


def vllm(rank: int, size: int, store: str) -> None:
    use("vllm")
    world.gloo(rank, size, store)


@contextlib.contextmanager
def replaced(program: str, **values: Any) -> Iterator[None]:
    """Replace names of a program, each by the last part of its name in REPLACED, in all modules that have it there."""
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            found = [path for path in REPLACED[program] if path.rpartition(".")[2] == name]
            assert found, f"{name} is not in the list of what is replaced in {program}"
            for path in found:
                module = importlib.import_module(path.rpartition(".")[0])
                stack.enter_context(mock.patch.object(module, name, value))
        yield


def put(program: str, of: Any, name: str, value: Any) -> None:
    """Set an attribute of an object whose class and name are in REPLACED."""
    assert f"{type(of).__name__}.{name}" in REPLACED[program]
    assert hasattr(of, name)
    setattr(of, name, value)
