"""How ranks that have a store of their own join, on one host or on several."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import secrets
import threading
from ctypes import byref, c_uint64
from typing import Any

from .. import errors
from .comm import Communicator, environ
from .meet import Chapter, Store, Terms, across, gather, place, ready
from .native import library


def join(
    rank: int,
    size: int,
    store: Store,
    options: dict[str, Any],
    name: str,
    stop: threading.Event | None = None,
    terms: Terms = ready,
    reach: str | None = None,
) -> Communicator | None:
    """Join ranks that have a store. Those of several hosts find each other on the interface that leads to the host reach.
    None means that the ranks do not reach each other, which every rank finds out alike. Unsupported is raised on all of
    several hosts where they cannot have symmetric memory."""
    options = {**options, "Rank": rank, "Size": size, "Name": name, "Environ": environ()}
    about = {"place": place(), "secret": secrets.token_hex(16), "reach": reach}
    listener, cards = _listen(options, store, about, stop, terms)
    if any(card["place"] != cards[0]["place"] for card in cards):
        library().unlisten(listener)
        here = across(rank, [card["place"] for card in cards])
        if here is None or not all(card["reach"] for card in cards):
            return None
        if not os.environ.get("SWITCHYARD_SECRET"):
            drawn = "".join(card["secret"] for card in cards)
            options["Secret"] = hashlib.sha256(drawn.encode()).hexdigest()
        options.update(LocalRank=here[0], LocalSize=here[1], Addr=f"{reach}:1")
        listener, cards = _listen(options, Chapter(store, "hosts"), {}, stop, ready)
        options.update(Listener=listener.value, Addrs=[card["addr"] for card in cards])
        return _open_across(options, name, Chapter(store, "joined"), stop)
    return Communicator._open({**options, "Listener": listener.value, "Addrs": [card["addr"] for card in cards]}, name)


def _open_across(options: dict[str, Any], name: str, store: Store, stop: threading.Event | None) -> Communicator:
    """Join ranks of several hosts, and tell each other how that went: whoever is refused first leaves the others."""
    comm, failed = None, None  # type: Communicator | None, errors.Error | None
    try:
        comm = Communicator._open(options, name)
        comm._hosts = int(options["Size"] // options["LocalSize"])
    except errors.Error as err:
        failed = err
    why = str(failed) if isinstance(failed, errors.Unsupported) else ""
    about = {"refused": why, "failed": failed is not None}
    cards = []
    try:
        cards = gather(options["Rank"], options["Size"], store, about, _seconds(options), stop)
    finally:
        together = bool(cards) and not any(card["failed"] for card in cards)
        if comm is not None and not together:
            comm._abandon()
    if comm is not None and together:
        return comm
    refused = [card["refused"] for card in cards if card["refused"]]
    if refused:
        raise errors.Unsupported(refused[0])
    raise failed or errors.PeerLost("switchyard: another rank failed to join")


def _listen(
    options: dict[str, Any], store: Store, about: dict[str, Any], stop: threading.Event | None, terms: Terms
) -> tuple[c_uint64, list[dict[str, Any]]]:
    """Open this rank's socket, and learn the cards of all ranks with their addresses."""
    lib, rank, size = library(), options["Rank"], options["Size"]
    listener, room = c_uint64(), ctypes.create_string_buffer(256)
    code = lib.listen(json.dumps(options).encode(), byref(listener), room, len(room))
    if code:
        error = lib.error(code)
        gather(rank, size, store, {"error": str(error)}, _seconds(options))
        raise error
    try:
        cards = gather(rank, size, store, {**about, "addr": room.value.decode()}, _seconds(options), stop, terms)
        if stop is not None and stop.is_set():
            raise errors.Closed("switchyard: the group was closed while its ranks met")
    except BaseException:
        lib.unlisten(listener)
        raise
    return listener, cards


def _seconds(options: dict[str, Any]) -> float:
    """How long ranks wait for each other."""
    return float(options.get("JoinSeconds") or 120.0)
