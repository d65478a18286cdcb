"""How a client and a backend show each other that they know the same token, which never travels.

    client                                  backend
    Hello(nonce c, version)         ->
                                    <-      Challenge(nonce s, HMAC(token, "backend", c, s))
    Proof(HMAC(token, "client", c, s)) ->
                                    <-      Welcome

The backend goes first: who only listens at an address learns nothing that depends on the token. Each side's
nonce is fresh, so a recorded proof is of no use later, and the two roles have labels of their own, so a proof
that is sent back to its maker proves nothing.

Shared by the nodes and the backend; standard library only.
"""

import hmac
import secrets

from .messages import VERSION

#: Shortest token that is taken: a proof can be tried against guesses by whoever has seen one, so a token must
#: not be guessable. launcher.py makes 64 characters of 256 random bits.
MIN_TOKEN = 32
BACKEND = "backend"
CLIENT = "client"
_NONCE_BYTES = 32


def new_nonce() -> str:
    """Return 32 random bytes as 64 hexadecimal digits; each handshake takes its own."""
    return secrets.token_hex(_NONCE_BYTES)


def is_nonce(text: str) -> bool:
    """Return whether ``text`` has the form of ``new_nonce``: the length is fixed, so that two nonces can be
    joined in one way only."""
    return len(text) == 2 * _NONCE_BYTES and all(digit in "0123456789abcdef" for digit in text)


def proof(token: str, role: str, client_nonce: str, backend_nonce: str) -> str:
    """Return the proof that ``role`` (BACKEND or CLIENT) knows ``token``: HMAC-SHA256 over the role and both
    nonces, as hexadecimal digits."""
    label = f"parallel-dit {VERSION} {role} {client_nonce} {backend_nonce}"
    return hmac.digest(token.encode(errors="surrogateescape"), label.encode(), "sha256").hex()


def is_proof(received: str, token: str, role: str, client_nonce: str, backend_nonce: str) -> bool:
    """Return whether ``received`` is that proof, in a time that does not depend on where the two differ."""
    expected = proof(token, role, client_nonce, backend_nonce)
    return hmac.compare_digest(received.encode(errors="replace"), expected.encode())
