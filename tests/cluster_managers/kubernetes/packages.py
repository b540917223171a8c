"""Debian's packages for the tests on Kubernetes.

``python -m tests.cluster_managers.kubernetes.packages`` prints those that are missing.
"""

from __future__ import annotations

import shutil

NEEDS = {
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "buildah": "buildah",
    "busybox": "busybox-static",
    "conntrack": "conntrack",
    "containerd": "containerd",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "ipset": "ipset",
    "iptables": "iptables",
    "nft": "nftables",
    "nsenter": "util-linux",
    "openssl": "openssl",
    "runc": "runc",
    "tini": "tini",
}
"""Packages by a program or a file of theirs."""


def missing() -> list[str]:
    """Return the packages that are not installed."""
    return sorted({package for program, package in NEEDS.items() if shutil.which(program) is None})


if __name__ == "__main__":
    print(*missing())
