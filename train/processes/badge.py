"""A badge: what a process shows at the coordinator's port to be let into a run, and how the port proves that it belongs to the run.

Whoever reaches the coordinator's port can claim to be a process of the run. A second process 1, a process of another run, or one with
another number of processes would break the collectives of those that are already in. So a process states its number, the number of
processes, the run's name and a checksum of the config, and signs them.

The signature is an HMAC with the run's token, which therefore never travels. Each side adds a random number of its own, so that nothing
that was overheard can be used again, and a different word, so that neither side can be made to sign the other's answer. Without a token
the key is empty: the badge then keeps mistakes out, but no attacker.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from dataclasses import dataclass
from typing import Any

from jgt.document import shown

GREETING = "jgt-join-1"
"""The first word of a coordinator's port that waits for processes, with the version of the protocol."""
MAX_LINE = 4_096
"""Bytes of a line in either direction. The longest one is a badge, with a name of at most 240 characters."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """What all processes of one run have in common: the number of processes, the run's name, a checksum of its config, and its token."""

    count: int
    run: str = ""
    config: str = ""
    token: bytes = b""


@dataclass(frozen=True, kw_only=True)
class Badge:
    """A process's claim to be number `process` of a run. nonce: the process's own random number, for the answer."""

    process: int
    count: int
    run: str
    config: str
    nonce: str
    signature: str


def new_nonce() -> str:
    """A random number that nobody can guess, in hexadecimal digits."""
    return secrets.token_hex(16)


def write_badge(member: Membership, process: int, nonce: str, port_nonce: str) -> str:
    """The line that a process shows: its claim, signed for the random number of the port."""
    claim = {"process": process, "count": member.count, "run": member.run, "config": member.config, "nonce": nonce}
    return json.dumps({**claim, "signature": _sign(member.token, "member", port_nonce, json.dumps(claim, sort_keys=True))})


def read_badge(line: bytes) -> Badge | None:
    """The badge of a line; None if the line is none."""
    try:
        fields: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    kinds = {"process": int, "count": int, "run": str, "config": str, "nonce": str, "signature": str}
    if not isinstance(fields, dict) or set(fields) != set(kinds):
        return None
    # type, because a bool is an int to isinstance.
    if any(type(fields[name]) is not kind for name, kind in kinds.items()):
        return None
    return Badge(**fields)


def is_signed(badge: Badge, member: Membership, port_nonce: str) -> bool:
    """Whether the badge's owner knows the run's token."""
    claim = {"process": badge.process, "count": badge.count, "run": badge.run, "config": badge.config, "nonce": badge.nonce}
    return _same(badge.signature, _sign(member.token, "member", port_nonce, json.dumps(claim, sort_keys=True)))


def badge_problem(badge: Badge, member: Membership, port_nonce: str) -> str | None:
    """Why this badge does not belong to a process of the run; None if it does."""
    # First, so that a stranger without the token learns nothing about the run.
    if not is_signed(badge, member, port_nonce):
        return "its token is not the run's. Give all processes the same JGT_TOKEN, or the same --token-file"
    if badge.run != member.run:
        return f"it belongs to the run {shown(badge.run)}, not to {shown(member.run)}. Give each run a coordinator port of its own"
    if badge.count != member.count:
        return f"it has --processes {badge.count:,}, and the run has {member.count:,}. Give all processes the same"
    if not 0 < badge.process < member.count:
        return f"its number is {badge.process:,}. The numbers to join are 1 to {member.count - 1:,}; process 0 is the one that listens"
    if badge.config != member.config:
        return "its config differs from process 0's. Give all processes the same"
    return None


def welcome(member: Membership, badge_nonce: str, port_nonce: str) -> str:
    """The port's answer to a badge, which only a port that knows the token can give."""
    return _sign(member.token, "port", port_nonce, badge_nonce)


def is_welcome(answer: str, member: Membership, badge_nonce: str, port_nonce: str) -> bool:
    """Whether this answer comes from a port that knows the token."""
    return _same(answer, welcome(member, badge_nonce, port_nonce))


def fingerprint(config: Any) -> str:
    """A checksum of a config of plain values."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()


def _sign(token: bytes, *parts: str) -> str:
    return hmac.new(token, "\0".join(parts).encode(errors="backslashreplace"), "sha256").hexdigest()


def _same(one: str, other: str) -> bool:
    # In constant time. As bytes, because compare_digest refuses text with other than ASCII characters.
    return hmac.compare_digest(one.encode(errors="backslashreplace"), other.encode(errors="backslashreplace"))
