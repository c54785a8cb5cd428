"""How an agent and the coordinator prove that they belong to one job: both know its token, and neither sends it.

Each side answers a challenge with an HMAC-SHA256 (RFC 2104) over both sides' random nonces, the sender's role and
what the sender claims, so that a proof cannot be replayed, reflected, or used for another claim. What follows is
not encrypted: the network between the nodes is trusted as far as the network of their collectives.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets

from checkpointless.launcher.protocol.causes import Int
from checkpointless.launcher.protocol.messages import Message, Vocabulary
from checkpointless.system.environment import TOKEN_ENV

_PROTOCOL_VERSION = 7
MIN_TOKEN_CHARACTERS = 16
SPARE = -1  # the node number of an agent that waits until it is needed


class Challenge(Message, frozen=True, tag="challenge"):
    """The coordinator's first message on every connection."""

    nonce: str
    version: Int = _PROTOCOL_VERSION


class Proof(Message, frozen=True, tag="proof"):
    """The agent's answer to the challenge.

    Attributes:
        node: the number of the agent's node; :data:`SPARE` if it takes whichever number is free.
    """

    node: Int
    nproc: Int
    nonce: str
    mac: str
    version: Int = _PROTOCOL_VERSION


class Welcome(Message, frozen=True, tag="welcome"):
    """The coordinator accepts the agent's proof and proves that it knows the token, too."""

    mac: str


class Refused(Message, frozen=True, tag="refused"):
    """The coordinator cannot use an agent that has proved itself."""

    reason: str


BEFORE_PROOF = Vocabulary("agent", Proof)
BEFORE_WELCOME = Vocabulary("coordinator", Challenge, Welcome, Refused)


def check_token(token: str) -> None:
    """Check that a job of several nodes may use a token.

    Raises:
        ValueError: the token is too short to be a secret.
    """
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise ValueError(
            f"several nodes need a secret of at least {MIN_TOKEN_CHARACTERS} characters in {TOKEN_ENV}, "
            "the same on all of them (openssl rand -hex 32 makes one)"
        )


def check_version(version: int) -> None:
    """Check that the other side has the messages of this one.

    Raises:
        ValueError: it has those of another version.
    """
    if version != _PROTOCOL_VERSION:
        raise ValueError(
            f"it has version {version} of the protocol, and this side {_PROTOCOL_VERSION}: install the same "
            "checkpointless on all nodes"
        )


def new_nonce() -> str:
    """Return 32 random bytes in hexadecimal."""
    return secrets.token_hex(32)


def prove(token: str, challenge: Challenge, node: int, nproc: int) -> Proof:
    """Return an agent's answer to ``challenge``."""
    nonce = new_nonce()
    return Proof(node, nproc, nonce, _mac(token, "agent", challenge.nonce, nonce, str(node), str(nproc)))


def is_proved(token: str, challenge: Challenge, proof: Proof) -> bool:
    """Return whether ``proof`` answers ``challenge`` and its sender knows the token."""
    mac = _mac(token, "agent", challenge.nonce, proof.nonce, str(proof.node), str(proof.nproc))
    return hmac.compare_digest(mac.encode(), proof.mac.encode())


def welcome(token: str, challenge: Challenge, proof: Proof) -> Welcome:
    """Return the coordinator's proof that it knows the token."""
    return Welcome(_mac(token, "coordinator", challenge.nonce, proof.nonce))


def is_welcome(token: str, challenge: Challenge, proof: Proof, answer: Welcome) -> bool:
    """Return whether the sender of ``answer`` knows the token."""
    return hmac.compare_digest(welcome(token, challenge, proof).mac.encode(), answer.mac.encode())


def _mac(token: str, *parts: str) -> str:
    return hmac.new(token.encode(), json.dumps(["checkpointless", *parts]).encode(), hashlib.sha256).hexdigest()
