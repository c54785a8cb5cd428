"""How two agents prove to each other that they belong to one job: both know its token, and neither says it.

Challenge and response by HMAC-SHA256 (RFC 2104) over both sides' random nonces, the speaker's role and what it
claims, so that a proof cannot be used again, turned around, or taken for another claim. What follows is not
encrypted: the network between the nodes is trusted as far as that of their collectives.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from dataclasses import dataclass
from typing import ClassVar

from checkpointless.agent.protocol import Vocabulary

TOKEN_ENV = "CHECKPOINTLESS_TOKEN"
MIN_TOKEN_CHARACTERS = 16
SPARE = -1  # the node number of an agent that waits to be needed


@dataclass(frozen=True)
class Challenge:
    """The coordinator's first word to whoever connects."""

    type: ClassVar[str] = "challenge"
    nonce: str


@dataclass(frozen=True)
class Proof:
    """The agent's answer.

    Attributes:
        node: its number; :data:`SPARE` if it takes whichever is free.
        nproc: how many ranks it runs.
        nonce: its own challenge.
        mac: proves that it knows the token.
    """

    type: ClassVar[str] = "proof"
    node: int
    nproc: int
    nonce: str
    mac: str


@dataclass(frozen=True)
class Welcome:
    """The coordinator believes the agent, and proves that it knows the token itself."""

    type: ClassVar[str] = "welcome"
    mac: str


@dataclass(frozen=True)
class Refused:
    """The coordinator cannot use an agent that has proved itself."""

    type: ClassVar[str] = "refused"
    reason: str


BEFORE_PROOF = Vocabulary("agent", Proof)
BEFORE_WELCOME = Vocabulary("coordinator", Challenge, Welcome, Refused)


def new_nonce() -> str:
    """32 random bytes, hex."""
    return secrets.token_hex(32)


def prove(token: str, challenge: Challenge, node: int, nproc: int) -> Proof:
    """An agent's answer to ``challenge``."""
    nonce = new_nonce()
    return Proof(node, nproc, nonce, _mac(token, "agent", challenge.nonce, nonce, str(node), str(nproc)))


def is_proved(token: str, challenge: Challenge, proof: Proof) -> bool:
    """Whether ``proof`` answers ``challenge`` with the token known."""
    mac = _mac(token, "agent", challenge.nonce, proof.nonce, str(proof.node), str(proof.nproc))
    return hmac.compare_digest(mac.encode(), proof.mac.encode())


def welcome(token: str, challenge: Challenge, proof: Proof) -> Welcome:
    """The coordinator's own proof."""
    return Welcome(_mac(token, "coordinator", challenge.nonce, proof.nonce))


def is_welcome(token: str, challenge: Challenge, proof: Proof, answer: Welcome) -> bool:
    """Whether ``answer`` comes from one who knows the token."""
    return hmac.compare_digest(welcome(token, challenge, proof).mac.encode(), answer.mac.encode())


def _mac(token: str, *parts: str) -> str:
    return hmac.new(token.encode(), json.dumps(["checkpointless", *parts]).encode(), hashlib.sha256).hexdigest()
