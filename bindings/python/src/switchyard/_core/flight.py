"""The last calls of ranks in the form of torch's flight recorder, which its analyzer reads: torchfrtrace."""

from __future__ import annotations

import json
import pickle
from datetime import datetime
from typing import Any

from .observe import CALLS, observe

#: The analyzer's names for operations. It knows no dispatch: calls of these have names of other collectives, each its own.
_NAMES = {
    "alltoallv": "all_to_all",
    "barrier": "barrier",
    "all-reduce": "all_reduce",
    "all-gather": "_all_gather_base",
    "reduce-scatter": "_reduce_scatter_base",
    "broadcast": "broadcast",
    "dispatch": "all_to_all_single",
    "redispatch": "all_to_all_single",
    "combine": "all_to_all_v_single",
    "dispatch backward": "allgather_coalesced",
    "combine backward": "allreduce_coalesced",
}
#: Operations whose payloads are equal on all ranks and as long as what they give.
_EQUAL = {"all-reduce"}
_STATES = {"enqueued": "scheduled", "started": "started", "finished": "completed", "failed": "completed"}


def _nanoseconds(text: str | None) -> int | None:
    """A time of the library's JSON, which has up to nine digits behind the second."""
    if not text:
        return None
    head, _, digits = text.removesuffix("Z").partition(".")
    return int(datetime.fromisoformat(head + "+00:00").timestamp()) * 10**9 + int(digits.ljust(9, "0") or 0)


def _entry(number: int, call: dict[str, Any]) -> dict[str, Any]:
    size = [[call["payload_bytes"] if call["operation"] in _EQUAL else 0]]
    started, finished = _nanoseconds(call.get("started")), _nanoseconds(call.get("finished"))
    return {
        "record_id": number,
        "pg_id": call["communicator"],
        "process_group": (str(call["communicator"]), _described(call)),
        "collective_seq_id": call["call"],
        "p2p_seq_id": 0,
        "op_id": call["seq"],
        "profiling_name": f"switchyard:{_NAMES[call['operation']]}",
        "time_created_ns": _nanoseconds(call["enqueued"]),
        "time_discovered_started_ns": started,
        "time_discovered_completed_ns": finished,
        "duration_ms": (finished - started) / 1e6 if started and finished else None,
        "input_sizes": size,
        "output_sizes": size,
        "input_dtypes": ["Byte"],
        "output_dtypes": ["Byte"],
        "state": _STATES[call["state"]],
        "retired": call["state"] in ("finished", "failed"),
        "timeout_ms": 0,
        "is_p2p": False,
        "frames": [],
    }


def _described(call: dict[str, Any]) -> str:
    return f"{call['group']}, communicator {call['communicator']}"


def write(prefix: str, job: str = "") -> list[str]:
    """Write a file for each rank of this user's job on this host whose identity begins with job, named by the prefix and the
    rank's number. Calls that not all ranks of a group make are left out."""
    ranks: dict[int, list[dict[str, Any]]] = {}
    calls = [call for call in json.loads(observe(CALLS)) or [] if call["call"] and call["operation"] in _NAMES]
    calls = [call for call in calls if call["job"].startswith(job)]
    jobs = {call["job"] for call in calls}
    if len(jobs) > 1:
        raise ValueError(f"several jobs run: {', '.join(sorted(jobs))}")
    for call in calls:
        ranks.setdefault(call["rank"], []).append(call)
    files = []
    for rank, own in sorted(ranks.items()):
        groups = {str(call["communicator"]): {"desc": _described(call), "ranks": str(sorted(call["members"]))} for call in own}
        files.append(f"{prefix}{rank}")
        with open(files[-1], "wb") as f:
            entries = [_entry(number, call) for number, call in enumerate(own)]
            pickle.dump({"version": "2.10", "pg_config": groups, "pg_status": {}, "entries": entries}, f)
    return files
