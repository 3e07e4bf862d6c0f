"""Signatures of manifests: a proof that a checkpoint was written by someone who has the run's key. Needs neither JAX nor Orbax.

Checksums detect accidents, not tampering: whoever can write to a run directory can change a parameter and recompute them. With
`checkpoint.key` the manifest of each step contains an HMAC-SHA256 of all its other contents, computed with a key that is not in the run
directory. The manifest contains the SHA-256 of each file, so the signature covers every byte of the step.

The invariants: the key is in no file, message or repr, only the name of its file or variable is; and a signature is compared in constant
time, so that the time of a refusal says nothing about the right one.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from jgt.document import InputError, read_bytes

FIELD = "signature"
_ENVIRONMENT = "env:"
_MIN_BYTES, _MAX_BYTES = 16, 4096
# Distinguishes these signatures from any other use of the same key.
_PURPOSE = b"jgt checkpoint manifest\0"
_REMEDY = f"Name a file with a key of {_MIN_BYTES} to {_MAX_BYTES} bytes, or a variable (env:NAME); openssl rand -hex 32 prints a key"


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key for signatures."""

    secret: bytes = field(repr=False)

    def sign(self, values: Mapping[str, object]) -> str:
        """The signature of a manifest's values, without the signature that they may contain."""
        others = {name: value for name, value in values.items() if name != FIELD}
        # Keys in order and no spaces, so that the text does not depend on how the file is written.
        text = json.dumps(others, sort_keys=True, separators=(",", ":"))
        return hmac.new(self.secret, _PURPOSE + text.encode(), hashlib.sha256).hexdigest()

    def problem(self, values: Mapping[str, object]) -> str | None:
        """Why a manifest's values are not trusted; None if they are."""
        signature = values.get(FIELD)
        if signature is None:
            return "it is not signed"
        # As bytes, because compare_digest refuses text that is not ASCII.
        right = hmac.compare_digest(str(signature).encode(errors="replace"), self.sign(values).encode())
        return None if right else "its signature does not match checkpoint.key"


def read_key(name: str | None, where: str = "checkpoint.key") -> Key | None:
    """The key in a file, or in a variable of the environment (`env:NAME`); None without a name.

    Line ends at the end do not belong to the key. where: begins a message. Raises InputError for a key that is missing or too short.
    """
    if name is None:
        return None
    if name.startswith(_ENVIRONMENT):
        what, content = f"the environment variable {name.removeprefix(_ENVIRONMENT)}", _variable(name.removeprefix(_ENVIRONMENT))
        if content is None:
            raise InputError([f"{where}: {what} is not set. {_REMEDY}"])
    else:
        what = name
        try:
            content = read_bytes(name, _MAX_BYTES)
        except InputError as error:
            raise InputError([f"{where}: {problem}. {_REMEDY}" for problem in error.problems]) from None
    secret = content.rstrip(b"\r\n")
    if len(secret) < _MIN_BYTES:
        raise InputError([f"{where}: the key in {what} has {len(secret)} bytes, which is too short. {_REMEDY}"])
    return Key(secret=secret)


def _variable(name: str) -> bytes | None:
    value = None if "\0" in name else os.environ.get(name)
    return None if value is None else os.fsencode(value)
