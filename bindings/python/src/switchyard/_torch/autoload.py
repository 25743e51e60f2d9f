"""Torch calls this when it is imported (entry point torch.backends), so that "switchyard" is a backend's name."""

from __future__ import annotations


def register() -> None:
    """Register the backend's name. The backend is loaded when a process group is made of it."""
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, "SWITCHYARD"):
        return

    def create(options: object, backend_options: object) -> object:
        from . import backend

        return backend.process_group(options, backend_options)

    dist.Backend.register_backend("switchyard", create, extended_api=True, devices=["cpu", "cuda"])
