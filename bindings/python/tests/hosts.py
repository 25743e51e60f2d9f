"""Hosts for tests: network namespaces on a bridge, joined by veth."""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType


class Unavailable(Exception):
    """What is missing here."""


class Hosts:
    """Namespaces that reach each other, until the end of the with block. rate bounds what each sends, as tc writes it."""

    def __init__(self, n: int, rate: str | None = None) -> None:
        for tool in ("unshare", "nsenter", "ip", "tc"):
            if shutil.which(tool) is None:
                raise Unavailable(f"needs {tool}")
        if os.geteuid() != 0:
            raise Unavailable("needs root, for network namespaces")
        self._holders: list[subprocess.Popen[bytes]] = []
        try:
            bridge = self._hold()
            self._run(bridge, "ip link add bridge type bridge", "ip link set bridge up")
            self.spaces = [self._hold() for _ in range(n)]
            for i, space in enumerate(self.spaces):
                self._run(space, f"ip link add name veth{i} type veth peer name port{i} netns {bridge}")
                self._run(bridge, f"ip link set port{i} master bridge up")
                self._run(space, f"ip addr add {self.address(i)}/24 dev veth{i}", f"ip link set veth{i} up")
                if rate:
                    self._run(space, f"tc qdisc replace dev veth{i} root tbf rate {rate} burst 512kb latency 50ms")
        except BaseException:
            self.close()
            raise

    def address(self, host: int) -> str:
        return f"10.78.0.{host + 1}"

    def within(self, host: int) -> list[str]:
        """What to put before a command that runs on the host."""
        return ["nsenter", "--net", "--mount", "--wd", "--target", str(self.spaces[host]), "--"]

    def _hold(self) -> int:
        # A namespace lives as long as the process in it, which ends with its standard input. Interfaces are looked up in
        # /sys, too.
        inside = "mount -t sysfs sysfs /sys && ip link set lo up && echo && exec cat"
        command = ["unshare", "--net", "--mount", "sh", "-c", inside]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._holders.append(holder)
        assert holder.stdout
        if not holder.stdout.readline():
            raise Unavailable("needs the right to make network namespaces")
        return holder.pid

    def _run(self, space: int, *commands: str) -> None:
        for command in commands:
            within = ["nsenter", "--net", "--mount", "--target", str(space), "--"]
            run = subprocess.run([*within, *command.split()], capture_output=True, text=True)
            if run.returncode:
                raise Unavailable(f"{command}: {run.stderr.strip()}")

    def close(self) -> None:
        for holder in self._holders:
            holder.communicate()
        self._holders = []

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
